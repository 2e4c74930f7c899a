"""Users' own functions in real runs: what they are given, what is refused beforehand, and that their processes end."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from novarl.core.types import Prompt, Rollout, Scored
from novarl.run.judge import write_samples
from tests.compose.harness import RL, events, finished, metrics, novarl, questions, snapshot, write_rows

TRL = """
    def texts(prompts, completions, answer, level):
        assert all(p == f"What is {a}?" and type(c) is str for p, c, a in zip(prompts, completions, answer))
        return [float(l) + len(c) % 3 for c, l in zip(completions, level)]

    def messages(prompts, completions, **columns):
        services = ["log_extra", "log_metric", "trainer_state"]
        assert sorted(columns) == ["answer", "completion_ids", "level", *services], columns
        assert all([m["role"] for m in p] == ["system", "user"] for p in prompts)
        assert all([m["role"] for m in c] == ["assistant"] for c in completions)
        return [float(len(c[0]["content"]) % 3) for c in completions]

    def needs(completions, solution):
        return [1.0 for _ in completions]

    def answered(completions, answer):
        return [1.0 for _ in completions]
"""
TOOLS = """
    import os
    from pathlib import Path

    def interact(messages):
        Path({folder!r}, str(os.getpid())).touch()
        while {hang}: pass
        return []

    def reward_fn(messages, answer):
        return float(len(messages[-1]["content"]) % 3)
"""


def rows(form: str) -> list[dict[str, Any]]:
    found = [{"prompt": row["prompt"], "answer": row["answer"], "level": 1} for row in questions()]
    if form == "texts":
        return found
    system = {"role": "system", "content": "Be brief."}
    return [row | {"prompt": [system, {"role": "user", "content": row["prompt"]}]} for row in found]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(TRL))
    return file


@pytest.mark.parametrize("form", ["texts", "messages"])
@pytest.mark.parametrize("command", ["rl", "eval"])
def test_trl_functions_get_prompts_as_the_data_has_them(tmp_path: Path, mine: Path, form: str, command: str) -> None:
    data, run = write_rows(tmp_path / "rows.jsonl", rows(form)), tmp_path / "run"
    more = RL if command == "rl" else ("model=tiny", "eval.n=4", "rollout.max_tokens=4")
    finished(command, *more, f"data={data}", f"reward={mine}:{form}", f"run_dir={run}")
    assert not events(run, "failed_rollout")


@pytest.mark.parametrize("command", ["rl", "eval"])
def test_a_column_that_the_data_lacks_is_refused_before_the_run(tmp_path: Path, mine: Path, command: str) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows("texts"))
    bare = write_rows(tmp_path / "bare.jsonl", [{"prompt": row["prompt"]} for row in rows("texts")])
    more = RL if command == "rl" else ("model=tiny",)
    before = snapshot(tmp_path)
    for file, name, column in ((data, "needs", "solution"), (bare, "answered", "answer")):
        ended = novarl(command, *more, f"data={file}", f"reward={mine}:{name}", f"run_dir={tmp_path / 'run'}")
        assert ended.code == 2 and ended.err.count("\n") == 1
        assert f"{name} needs the column '{column}', which the data does not have" in ended.err
    assert snapshot(tmp_path) == before


def test_a_column_that_only_the_held_out_rows_lack_is_refused_too(tmp_path: Path, mine: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [row | {"solution": "x"} for row in rows("texts")])
    held_out = write_rows(tmp_path / "held_out.jsonl", rows("texts"))
    words = (f"data={data}", f"eval.data={held_out}", f"reward={mine}:needs", f"run_dir={tmp_path / 'run'}")
    ended = novarl("rl", *RL, *words)
    assert ended.code == 2 and "needs the column 'solution'" in ended.err


def tools(folder: Path, *, hang: bool) -> tuple[str, Path]:
    """The key that names a file with `interact`, and where that leaves the ids of its processes."""
    seen, file = folder / "seen", folder / "tools.py"
    seen.mkdir()
    file.write_text(textwrap.dedent(TOOLS.format(folder=str(seen), hang=hang)))
    return f"rollout.env_path={file}", seen


def running(seen: Path) -> list[str]:
    return [worker.name for worker in seen.iterdir() if (Path("/proc") / worker.name).exists()]


@pytest.mark.parametrize("command", ["rl", "eval"])
def test_the_process_of_interact_ends_with_the_run(tmp_path: Path, command: str) -> None:
    data, (env, seen) = write_rows(tmp_path / "rows.jsonl", rows("texts")), tools(tmp_path, hang=False)
    more = RL if command == "rl" else ("model=tiny", "eval.n=4", "rollout.max_tokens=4")
    finished(command, *more, f"data={data}", env, f"run_dir={tmp_path / 'run'}")
    assert len(list(seen.iterdir())) == 1 and not running(seen)


def test_interact_has_the_limit_of_the_rewards(tmp_path: Path) -> None:
    data, (env, seen) = write_rows(tmp_path / "rows.jsonl", rows("texts")), tools(tmp_path, hang=True)
    words = ("model=tiny", "eval.n=4", "rollout.max_tokens=4", f"data={data}", env, "rollout.reward_timeout=0.5")
    ended = novarl("eval", *words, f"run_dir={tmp_path / 'run'}")
    assert ended.code == 2 and "timed out after 0.5 s" in ended.err
    assert 0 < len(list(seen.iterdir())) <= 4 and not running(seen), "a process for each that was waited for"


def test_after_an_evaluation_nothing_is_advised_that_was_not_written(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", questions())
    run = tmp_path / "run"
    words = ("model=tiny", "eval.n=2", "rollout.max_tokens=4", f"data={data}", "reward=length", f"run_dir={run}")
    said = finished("eval", *words).out
    assert "tensorboard" not in said and f"less {run}/samples.md" in said


@pytest.mark.parametrize("form", ["texts", "messages"])
def test_samples_show_all_that_was_asked(tmp_path: Path, form: str) -> None:
    data, run = write_rows(tmp_path / "rows.jsonl", rows(form)), tmp_path / "run"
    finished(
        "eval", "model=tiny", "eval.n=2", "rollout.max_tokens=4", f"data={data}", "reward=length", f"run_dir={run}"
    )
    shown = (run / "samples.md").read_text()
    assert shown.count("system:\n\n```\nBe brief.\n```\n\nuser:\n\n```\n") == (2 if form == "messages" else 0)
    assert shown.count("user:") == (2 if form == "messages" else 0)


def test_samples_show_every_turn(tmp_path: Path) -> None:
    def says(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    asked = Prompt("rows:1", (1,), (says("user", "2 + 3?"),))
    turns = (says("assistant", "add(2, 3)"), says("tool", "5"), says("assistant", "It is 5."))
    told = Rollout(asked, 0, 0, (), (*asked.messages, *turns), "It is 5.", finish_reason="turns", info={"turns": 2})
    write_samples(tmp_path / "samples.md", [Scored(told, {}, 1.0)])
    shown = (tmp_path / "samples.md").read_text()
    given = "answer (reward 1.000, truncated at the turn limit):\n\n"
    parts = (f"{name}:\n\n```\n{text}\n```" for name, text in (turn.values() for turn in turns))
    assert shown.endswith(given + "\n\n".join(parts) + "\n")
    assert "## 1. rows:1\n\n```\n2 + 3?\n```" in shown and "user:" not in shown


@pytest.mark.parametrize("command", ["rl", "eval"])
def test_the_environments_own_reward_is_trained_on(tmp_path: Path, command: str) -> None:
    data, env = write_rows(tmp_path / "rows.jsonl", rows("texts")), tmp_path / "env.py"
    env.write_text("def interact(messages, answer):\n    return {'reward': len(messages[-1]['content']) + 0.5}\n")
    words = ("reward=environment", f"data={data}", f"run_dir={tmp_path / 'run'}")
    more = RL if command == "rl" else ("model=tiny", "eval.n=4", "rollout.max_tokens=4")
    finished(command, *more, *words, f"rollout.env_path={env}")
    if command == "rl":
        assert all(record["rewards/environment_mean"] > 0.5 for record in metrics(tmp_path / "run"))
    ended = novarl(command, *more, *words[:2], f"run_dir={tmp_path / 'none'}")
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert "reward=environment: no environment is configured" in ended.err


@pytest.mark.parametrize("command", ["rl", "eval"])
def test_an_environment_file_with_only_a_reward_runs_at_one_turn(tmp_path: Path, command: str) -> None:
    data, env, run = write_rows(tmp_path / "rows.jsonl", rows("texts")), tmp_path / "env.py", tmp_path / "run"
    env.write_text("def reward_fn(messages, answer):\n    return float(len(messages)) + len(answer) / 100\n")
    more = RL if command == "rl" else ("model=tiny", "eval.n=4", "rollout.max_tokens=4")
    finished(command, *more, f"data={data}", f"actor.rollout.env_path={env}", f"run_dir={run}")
    if command == "rl":
        rewards = [json.loads(line)["reward_mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert rewards and all(2.0 < reward < 2.1 for reward in rewards)
    ended = novarl(command, *more, f"data={data}", f"actor.rollout.env_path={env}", "rollout.max_turns=2")
    assert ended.code == 2 and "has no function 'interact'" in ended.err
    given = novarl(command, *more, f"data={data}", f"rollout.env_path={env}", "reward=environment")
    assert given.code == 2 and "has no function 'interact'" in given.err


LOGS = """
    def logs(completions, answer, trainer_state, log_extra, log_metric, **kwargs):
        log_extra("length", [len(c) for c in completions])
        log_metric("step", trainer_state.global_step)
        return [None if i % 2 else 1.0 + len(c) % 3 for i, c in enumerate(completions)]

    def others(completions, **kwargs):
        return [2.0 if i % 2 else None for i, c in enumerate(completions)]
"""


def test_what_trl_functions_log_is_in_the_run(tmp_path: Path) -> None:
    data, mine, run = write_rows(tmp_path / "rows.jsonl", rows("texts")), tmp_path / "mine.py", tmp_path / "run"
    mine.write_text(textwrap.dedent(LOGS))
    both = (f"reward.logs.source={mine}:logs", f"reward.others.source={mine}:others")
    finished("rl", *RL, f"data={data}", *both, f"run_dir={run}", "steps=2", "log.rollouts_every=1")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["logged/step"] for record in records if record["phase"] == "rl"][-1] == 1.0
    lines = [json.loads(line) for file in (run / "rollouts").glob("*.jsonl") for line in file.open()]
    assert lines and all(line["extra"] == {"length": len(line["text"])} for line in lines)
    assert {tuple(line["rewards"]) for line in lines} == {("logs",), ("others",)}
    assert all(line["reward"] is not None for line in lines)


@pytest.mark.parametrize(
    ("command", "row", "unused"),
    [
        ("rl", {"prompt": "a?", "answer": "a", "level": 1, "topic": "x"}, "topic"),
        ("eval", {"prompt": "a?", "answer": "a", "level": 1, "topic": "x"}, "topic"),
        ("sft", {"prompt": "a?", "completion": "a", "source": "web"}, "source"),
        ("dpo", {"prompt": "a?", "chosen": "a", "rejected": "b", "score_chosen": 1.0}, "score_chosen"),
        ("rm", {"prompt": "a?", "chosen": "a", "rejected": "b", "score_chosen": 1.0}, "score_chosen"),
    ],
)
def test_a_run_says_at_its_start_what_nothing_uses(
    tmp_path: Path, command: str, row: dict[str, Any], unused: str
) -> None:
    data, mine, run = write_rows(tmp_path / "rows.jsonl", [row] * 4), tmp_path / "mine.py", tmp_path / "run"
    mine.write_text(
        "def some(messages, level):\n    return level\n\ndef every(completions, **kwargs):\n    return [1] * 4\n"
    )
    small = ("model=tiny", f"data={data}", "log.console=false") if command != "eval" else ("model=tiny", f"data={data}")
    more = {"rl": RL, "eval": ("eval.n=4", "rollout.max_tokens=4")}.get(command, ("steps=1", "batch_size=2"))
    reward = (f"reward={mine}:some",) if command in ("rl", "eval") else ()
    ended = finished(command, *more, *small, *reward, f"run_dir={run}")
    said = f"unused data columns: {unused}"
    assert ended.out.count(said) == 1 if command == "eval" else [said] == told(run)
    if command == "rl":  # its `**kwargs` receive every column
        finished(command, *more, *small, f"reward={mine}:every", f"run_dir={tmp_path / 'other'}")
        assert told(tmp_path / "other") == []


def told(run: Path) -> list[str]:
    """The notes on unused columns at a run's start."""
    alerts = [alert["message"] for alert in events(run, "alert")]
    return [text for text in alerts if text.startswith("unused data columns")]
