"""Which rows of a data file are held out."""

from __future__ import annotations

from pathlib import Path

import pytest

from novarl.compose.rows import sft_rows
from novarl.config.tree import SFTConfig
from novarl.data.rows import set_aside
from novarl.models.load import load
from tests.compose.harness import QUIET, events, finished, write_rows


@pytest.mark.parametrize("sizes", [[1] * 40, [3] * 40, [1 + row % 4 for row in range(47)]])
@pytest.mark.parametrize("most", [1, 3, 500])
def test_a_row_stays_on_one_side(sizes: list[int], most: int) -> None:
    items = [(row, piece) for row, size in enumerate(sizes) for piece in range(size)]
    train, held_out = set_aside(items, most, sizes)
    assert sorted(train + held_out) == items
    assert train == sorted(train) and held_out == sorted(held_out)
    rows = [{row for row, _ in side} for side in (train, held_out)]
    assert not rows[0] & rows[1], "a row is learnt from and measured on"
    assert len(rows[1]) == min(most, len(sizes) // 10), "what is asked for are rows"


def test_where_a_row_is_one_item_nothing_else_need_be_said() -> None:
    items = list(range(40))
    assert set_aside(items, 3) == set_aside(items, 3, [1] * 40)
    assert set_aside(items[:9], 3) == (items[:9], [])


FORGETFUL = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}"
    "{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Like Qwen3's: a turn's thoughts are there while it is the last one, and gone afterwards."""


def test_the_sequences_of_a_conversation_are_all_learnt_from_or_all_measured_on(tmp_path: Path) -> None:
    def talk(name: str) -> dict[str, object]:
        turns = [f"{name} first", f"<think>hm</think>{name} one", f"{name} second", f"<think>hm</think>{name} two"]
        return {"messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]}

    data = write_rows(tmp_path / "rows.jsonl", (talk(f"row{number:02d}") for number in range(40)))
    policy = load("tiny", seed=0)
    policy.tokenizer.chat_template = FORGETFUL
    rows = sft_rows(SFTConfig(data=str(data), eval={"n": 3}), None, policy)
    assert (len(rows.train), len(rows.held_out), rows.counts.used) == (2 * 37, 2 * 3, 40)

    def names(side: list[object]) -> set[str]:
        return {policy.tokenizer.decode(sequence.tokens).partition("row")[2][:2] for sequence in side}

    assert len(names(rows.train)) == 37 and len(names(rows.held_out)) == 3
    assert not names(rows.train) & names(rows.held_out)


def asked(number: int) -> dict[str, str]:
    return {"prompt": f"question {number}", "answer": f"{number}"}


def told(number: int) -> dict[str, str]:
    return {"prompt": f"question {number}", "completion": f"{number}"}


def preferred(number: int) -> dict[str, str]:
    return {"prompt": f"question {number}", "chosen": f"{number}", "rejected": "no"}


def judged(number: int) -> dict[str, object]:
    return {"prompt": f"question {number}", "completion": f"{number}", "label": number % 2 == 0}


RUNS = {
    "rl": (asked, ("rl", "reward=length", "algo=grpo", "prompts_per_rollout=2", "responses_per_prompt=2")),
    "sft": (told, ("sft",)),
    "dpo": (preferred, ("dpo", "batch_size=2")),
    "kto": (judged, ("dpo", "loss=kto", "batch_size=2")),
    "rm": (preferred, ("rm", "batch_size=2")),
}


@pytest.mark.parametrize("kind", RUNS)
def test_held_out_rows_that_are_learnt_from_too_are_counted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row, words = RUNS[kind]
    write_rows(tmp_path / "rows.jsonl", map(row, range(20)))
    write_rows(tmp_path / "twice.jsonl", [row(number % 19) for number in range(40)])
    write_rows(tmp_path / "others.jsonl", map(row, (3, 21, 5, 22, 30, 31)))
    more = ("rollout.max_tokens=4",) if kind == "rl" else ()
    for name, expected in (
        ("data=rows.jsonl", None),
        *([("data=twice.jsonl", "4 of 4")] if kind != "kto" else []),  # which holds out as many good rows as bad ones
        ("data=rows.jsonl eval.data=others.jsonl", "2 of 6"),
        ("data=rows.jsonl eval.data=rows.jsonl eval.n=1", "1 of 1"),
    ):
        run = tmp_path / name.replace(".", "_").replace("=", "_")
        finished(*words, *name.split(), "model=tiny", "steps=1", *more, *QUIET, f"run_dir={run}")
        notes = [event["message"] for event in events(run, "alert") if "held-out" in event["message"]]
        rows = "row is" if expected == "1 of 1" else "rows are"
        of = None if expected is None else f"{expected} held-out {rows} also in the training data"
        assert [note.startswith(str(of)) for note in notes] == ([] if of is None else [True]), notes
