"""Writes docs/from_trl.md: what becomes of TRL's documented rows and reward functions, found out by running each.

python -m benchmarks.from_trl > docs/from_trl.md
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.trl_cases import HARMONY, OWN_TEMPLATE, REWARDS, ROWS, SCHEMA, RewardCase, RowCase
from novarl.data.dataset import load_rl, load_sft
from novarl.data.pairs import Labelled, Reading, load_labelled, load_pairs
from novarl.models.byte_tokenizer import CHAT_TEMPLATE, ByteTokenizer
from tests.compose.harness import RL, SFT, events, novarl, write_rows

LONG = 4000
TINY = {
    "rl": (*RL, "eval.n=0"),
    "sft": SFT,
    "dpo": ("batch_size=2", "steps=1", "model=tiny"),
    "rm": ("batch_size=2", "steps=1", "model=tiny"),
}
QUIET = ("log.console=false", "log.tensorboard=false", "model=tiny", f"max_length={LONG}")
ABOUT = """\
# From TRL

Every form of row and of reward function that the documentation of TRL 1.x shows, run here on the built-in model: it
either runs (columns that are not used are reported at the start) or is refused with the message shown, before the run
or at the latest at its first step.
Where a row runs, all of its texts are in what is trained on or sampled from, or the message names the key to set.
Written by `python -m benchmarks.from_trl > docs/from_trl.md`; a test compares.

Names of TRL's configurations are in [names.md](names.md), chat templates in [chat_templates.md](chat_templates.md).
A text prompt is one user turn, as a chat model needs it; TRL continues it as it is, which here is
`apply_chat_template=false`.
"""
ABOUT_REWARDS = """
## Reward functions

A function that takes `completions`, `completion_ids` or only `**kwargs` is given the batch as TRL gives it.
`log_extra` adds columns to `extra` in the rollout log, `log_metric` the metric `logged/<name>`. `None` from one of
several rewards means that it does not apply to the answer; an answer to which none applies is a failed rollout, never
a 0.

| documented | words | what happens |
|---|---|---|
"""


def page() -> str:
    """docs/from_trl.md. Everything is run, in a folder of its own."""
    lines = [ABOUT, "## Rows\n\n| documented | a row | command | what happens |\n|---|---|---|---|\n"]
    with _folder():
        for case in ROWS:
            shown = json.dumps(case.row, ensure_ascii=False)
            shown = shown if len(shown) <= 160 else f"{shown[:157]}..."
            for command in case.commands:
                lines.append(
                    f"| {case.name} | `{_cell(shown)}` | `novarl {command}` | {_cell(of_row(case, command))} |\n"
                )
        lines.append(ABOUT_REWARDS)
        for reward in REWARDS:
            words = " ".join(reward.words)
            lines.append(f"| {_cell(reward.name)} | `{words}` | {_cell(of_reward(reward))} |\n")
    return "".join(lines)


def of_row(case: RowCase, command: str) -> str:
    """What a command makes of a documented row. AssertionError where some of it is lost in silence."""
    row = {name: json.dumps([SCHEMA]) if item == "SCHEMAS" else item for name, item in case.row.items()}
    name, *words = command.split()
    Path("harmony.jinja").write_text(HARMONY)
    found, notes = _run(name, *words, *(("reward=length",) if name == "rl" else ()), rows=[row] * 2)
    if found == "runs":
        labelled = any("kto" in word or "bce" in word for word in words)
        text = learnt(name, row, labelled=labelled, template=HARMONY if words == [OWN_TEMPLATE] else CHAT_TEMPLATE)
        for path, leaf in _texts(row):
            said = any(key in " ".join(notes).replace(",", " ").split() for key in path)
            assert all(word in text for word in leaf.split()) or said, (
                f"{case.name}: {'.'.join(path)} = {leaf!r} is lost in silence"
            )
    return "; ".join([found, *notes])


def of_reward(case: RewardCase) -> str:
    """What becomes of a run with a documented reward function."""
    Path("mine.py").write_text(case.code)
    words = case.words
    if "reward=model:MODEL" in words:
        rows = [{"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}] * 2
        found, _ = _run("rm", "loss=bt", "run_dir=judge", rows=rows)
        assert found == "runs", found
        words = ("reward=model:judge",)
    found, notes = _run("rl", *words, rows=case.rows)
    return "; ".join([found, *notes])


def learnt(command: str, row: dict[str, Any], *, labelled: bool = False, template: str = CHAT_TEMPLATE) -> str:
    """All text that a row is trained on or sampled from."""
    tokenizer, rows = ByteTokenizer(template), write_rows(Path("one.jsonl"), [row])
    reading = Reading(tokenizer, LONG)
    if command == "rl":
        return "".join(
            tokenizer.decode(prompt.tokens) for prompt in load_rl(rows, tokenizer=tokenizer, max_length=LONG)[0]
        )
    if command == "sft":
        sequences = load_sft(rows, tokenizer=tokenizer, max_length=LONG)[0]
    elif labelled:
        answers: list[Labelled] = [answer for answers in load_labelled(rows, reading)[0] for answer in answers]
        sequences = [answer.sequence for answer in answers]
    else:
        sequences = [side for pair in load_pairs(rows, reading)[0] for side in (pair.chosen, pair.rejected)]
    return "".join(tokenizer.decode(sequence.tokens) for sequence in sequences)


def _run(command: str, *words: str, rows: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """("runs" or "refused: why", what was said of keys that nothing uses)."""
    run = Path(f"run-{len(list(Path.cwd().iterdir()))}")
    given = (f"run_dir={run}", *words) if not any(word.startswith("run_dir=") for word in words) else words
    data = write_rows(Path(f"rows{run.name}.jsonl"), rows)
    ended = novarl(command, *TINY[command], *QUIET, f"data={data}", *given)
    if ended.code:
        assert ended.code == 2 and "command line" not in ended.err, ended.err
        said = ended.err.removeprefix("novarl: ").strip().replace(data.name, "rows.jsonl")
        return f"refused: {said.replace('mine.py:', 'mine.py, line ', 1) if said.startswith('mine.py:') else said}", []
    if not run.exists():
        return "runs", []
    failed = events(run, "failed_rollout")
    assert not failed, failed[0]["error"]
    alerts = [alert["message"] for alert in events(run, "alert")]
    unused = ("unused data columns", "unused message keys", "message keys that", "keyword arguments that")
    return "runs", [text for text in alerts if text.startswith(unused)]


def _texts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """The texts in a row that say something, each with the keys that lead to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in ("role", "type"):
                yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, path)
    elif isinstance(value, str) and path[-1] != "type":
        try:
            inner = json.loads(value)
        except ValueError:
            inner = value
        if isinstance(inner, list | dict):
            yield from _texts(inner, path)
        else:
            yield path, value.strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


if __name__ == "__main__":
    print(page(), end="")
