"""What a run lives through: rows and rewards that fail, a reward that hangs, a tokenizer without a pad token."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from novarl.rewards.user_process import MOST_HANGS, MOST_WORKERS
from tests.compose.harness import (
    ON_TASK,
    RL,
    SFT,
    events,
    finished,
    metrics,
    novarl,
    questions,
    snapshot,
    summary,
    write_rows,
)

STRANGE = {
    "raise": "raised ValueError: this row is bad",
    "none": "returned None",
    "nan": "returned nan",
    "infinity": "returned inf",
    "text": "returned '1.0', a str, not a number",
    "exit": "raised SystemExit: 3",
    "die": "exited with code 3",
}
"""What the reward below does for some answers, and what is said of it."""
REWARD = """
    import os, sys

    def reward_fn(messages, answer):
        if answer == "raise":
            raise ValueError("this row is bad")
        if answer == "exit":
            sys.exit(3)
        if answer == "die":
            os._exit(3)
        odd = {"none": None, "nan": float("nan"), "infinity": float("inf"), "text": "1.0"}
        return odd.get(answer, float(len(messages[-1]["content"]) % 3))
"""
HANG = """
    def reward_fn(messages, answer):
        while True: pass

    def batch(prompts, completions):
        while True: pass
"""
HANG_ONCE = """
    from pathlib import Path

    def reward_fn(messages, answer):
        if not Path({mark!r}).exists():
            Path({mark!r}).touch()
            while True: pass
        return float(len(messages[-1]["content"]) % 3)
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", questions())


def write_reward(folder: Path, code: str) -> Path:
    file = folder / "mine.py"
    file.write_text(textwrap.dedent(code))
    return file


def test_rollouts_without_a_score_are_failed_counted_and_left_out(tmp_path: Path) -> None:
    answers = [*STRANGE, "fine", "also fine", "held out"]
    data = write_rows(tmp_path / "rows.jsonl", ({"prompt": f"say {word}", "answer": word} for word in answers))
    reward, run = write_reward(tmp_path, REWARD), tmp_path / "run"
    words = (*RL, f"data={data}", f"reward={reward}:reward_fn", f"run_dir={run}", "prompts_per_rollout=9")
    ended = finished("rl", *words)
    assert ended.err == "", "a reward that fails is no noise"
    (record,) = metrics(run)
    assert (record["episodes"], record["failed_rollouts"]) == (18, 2 * len(STRANGE))
    assert (record["groups_kept"], record["groups_dropped"]) == (2, len(STRANGE))
    assert 0 <= record["reward_raw_mean"] <= 2 and record["reward_raw_mean"] == record["reward_mean"]
    failed = {(event["prompt"], event["index"]): event["error"] for event in events(run, "failed_rollout")}
    expected = {
        (f"rows.jsonl:{line}", index): f"reward 'reward_fn' {why}"
        for line, why in enumerate(STRANGE.values(), start=1)
        for index in (0, 1)
    }
    assert failed.keys() == expected.keys()
    assert all(failed[name].startswith(why) for name, why in expected.items())
    logged = [json.loads(line) for line in (run / "rollouts" / "step-000001.jsonl").read_text().splitlines()]
    assert [row["status"] for row in logged].count("failed") == 2 * len(STRANGE)
    assert all((row["reward"] is None) == (row["status"] == "failed") for row in logged)


@pytest.mark.parametrize("how", ["raise", "nan", "none", "text"])
def test_where_every_rollout_fails_it_is_the_users_mistake(tmp_path: Path, how: str) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": how}] * 20)
    reward, run = write_reward(tmp_path, REWARD), tmp_path / "run"
    words = ("rl", *RL, f"data={data}", f"reward={reward}:reward_fn", f"run_dir={run}")
    ended = novarl(*words)
    said = f"novarl: reward: the reward failed for every rollout of the step: reward 'reward_fn' {STRANGE[how]} "
    fix = f"(fix the reward function{'; events.jsonl of the run contains all tracebacks' * (how == 'raise')})"
    assert (ended.code, ended.out, ended.err) == (2, "", f"{said}{fix}\n")
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "fine"}] * 20)
    finished(*words, "resume=auto")


def test_where_every_row_of_an_evaluation_fails_nothing_is_written(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "raise"}] * 3)
    reward = write_reward(tmp_path, REWARD)
    before = snapshot(tmp_path)
    words = (f"data={data}", f"reward={reward}:reward_fn", "rollout.max_tokens=4", f"run_dir={tmp_path / 'run'}")
    ended = novarl("eval", "model=tiny", *words)
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert "the reward failed for every row: reward 'reward_fn' raised ValueError: this row is bad (" in ended.err
    assert snapshot(tmp_path) == before


def test_a_reward_that_hangs_once_costs_one_rollout_and_its_limit(tmp_path: Path, rows: Path) -> None:
    limit, run = 1.0, tmp_path / "run"
    reward = write_reward(tmp_path, HANG_ONCE.format(mark=str(tmp_path / "hung")))
    words = ("eval.n=1", "steps=2", f"rollout.reward_timeout={limit}", "warmup=0")
    finished("rl", *RL, *words, f"data={rows}", f"reward={reward}:reward_fn", f"run_dir={run}")
    # The very first call belongs to the evaluation before training; let it hang in the first step of another run.
    assert summary(run)["before"] == {"score": None, "interval": [None, None], "n": 0, "failed": 1}
    assert summary(run)["after"]["n"] == 1
    (tmp_path / "hung").unlink()
    again = tmp_path / "again"
    held_out = write_rows(tmp_path / "few.jsonl", questions(9))
    finished("rl", *RL, *words, f"data={held_out}", f"reward={reward}:reward_fn", f"run_dir={again}")
    first, second = metrics(again)
    assert (first["failed_rollouts"], second["failed_rollouts"]) == (1, 0)
    assert first["time/reward_s"] >= limit
    (event,) = events(again, "failed_rollout")
    assert event["error"] == "reward 'reward_fn' timed out after 1 s and was stopped"


@pytest.mark.parametrize("form", ["reward_fn", "batch"])
def test_a_reward_that_always_hangs_costs_its_step_a_few_limits(tmp_path: Path, form: str) -> None:
    limit, reward = 1.0, write_reward(tmp_path, HANG)
    data = write_rows(tmp_path / "rows.jsonl", questions(9))
    words = (
        f"data={data}",
        f"reward={reward}:{form}",
        f"rollout.reward_timeout={limit}",
        f"run_dir={tmp_path / 'run'}",
    )
    ended = novarl("rl", *RL, *words, "prompts_per_rollout=9")
    assert ended.code == 2 and ended.err.count("\n") == 1 and "timed out after 1 s" in ended.err
    failed = events(tmp_path / "run", "failed_rollout")
    assert len(failed) == 18, "why they failed is told, though nothing was learnt"
    skipped = sum("was skipped: calls before it timed out after 1 s" in event["error"] for event in failed)
    if form == "batch":  # in one call
        assert skipped == 0
    else:
        assert 18 - (MOST_HANGS + MOST_WORKERS) < skipped <= 18 - MOST_HANGS


@pytest.mark.parametrize("command", ["rl", "sft", "eval"])
def test_a_bad_row_in_two_hundred_is_named_counted_and_left_out(tmp_path: Path, command: str) -> None:
    good = questions(200)
    data = write_rows(
        tmp_path / "rows.jsonl", [*good[:100], {"prompt": ["?"], "completion": "a", "answer": "a"}, *good[101:]]
    )
    run, more = tmp_path / "run", {"rl": RL, "sft": SFT, "eval": ("model=tiny", "rollout.max_tokens=4", "eval.n=2")}
    judged = () if command == "sft" else ("reward=length",)
    finished(command, *more[command], *judged, f"data={data}", f"run_dir={run}")
    (event,) = events(run, "bad_row")
    assert (event["where"], event["field"]) == ("rows.jsonl:101", "prompt[0]")
    assert event["reason"] == "must be an object with role and content, not a string"
    held_out = summary(run)["rows"].pop("held_out")
    assert held_out == 2
    assert summary(run)["rows"] == {"read": 200, "used": 199, "truncated": 0, "refused": 1, "held_out": 2}


@pytest.mark.parametrize("command", ["rl", "sft", "eval"])
def test_three_bad_rows_in_a_hundred_are_too_many(tmp_path: Path, command: str) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [*questions(97), {"prompt": 1}, {}, []])
    before = snapshot(tmp_path)
    more = {"rl": ("reward=length",), "sft": (), "eval": ("reward=length", "model=tiny")}
    ended = novarl(command, *more[command], f"data={data}", f"run_dir={tmp_path / 'run'}")
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert "3 of 100 rows cannot be used, more than max_bad_rows=0.01 allows: rows.jsonl:98" in ended.err
    assert snapshot(tmp_path) == before


def test_rows_that_are_cut_are_counted(tmp_path: Path) -> None:
    long = {"prompt": "x" * 50, "completion": "y" * 50, "answer": "z"}
    data = write_rows(tmp_path / "rows.jsonl", [*questions(18), long, long])
    finished("sft", *SFT, f"data={data}", "max_length=70", f"run_dir={tmp_path / 'sft'}")
    words = (f"data={data}", "max_length=40", "on_long=truncate", "reward=length", f"run_dir={tmp_path / 'rl'}")
    finished("rl", *RL, *words)
    expected = {"read": 20, "used": 20, "truncated": 2, "refused": 0, "held_out": 2}
    assert summary(tmp_path / "sft")["rows"] == summary(tmp_path / "rl")["rows"] == expected


def test_a_tokenizer_without_a_pad_token_pads_with_its_end(tmp_path: Path, rows: Path) -> None:
    """Masks come from lengths, never from ids: nothing is lost by it."""
    finished("rl", *ON_TASK, f"run_dir={tmp_path / 'made'}")
    model = tmp_path / "made" / "checkpoints" / "latest" / "model"
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("pad_token")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    run = tmp_path / "run"
    finished("rl", *RL, f"model={model}", f"data={rows}", "reward=lexical", "rollout.max_tokens=12", f"run_dir={run}")
    saved = json.loads((run / "checkpoints" / "latest" / "model" / "tokenizer_config.json").read_text())
    assert saved["pad_token"] == saved["eos_token"] == "<eos>"
    (record,) = metrics(run)
    assert record["completion_tokens"] > 0 and record["mismatch_max"] < 1e-3
