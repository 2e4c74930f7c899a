"""The last page of a run: the promised lines, honest bars, advice that fits how the run ended."""

from __future__ import annotations

import math
from typing import Any

import pytest

from novarl.observe.summary import next_steps, render_summary

FULL: dict[str, Any] = {
    "status": "done",
    "command": "rl",
    "task": "sort",
    "algo": "dr_grpo",
    "other_algo": "grpo",
    "seconds": 95.234,
    "steps": 24,
    "rows": {"read": 7473, "used": 7470, "truncated": 0, "refused": 0},
    "before": {"score": 0.05, "interval": [0.034, 0.073], "n": 500},
    "after": {"score": 0.982, "interval": [0.966, 0.991], "n": 500},
    "paths": {
        "run_dir": "runs/x",
        "logs": "runs/x/logs/train.jsonl",
        "tensorboard": "runs/x/tb",
        "checkpoints": "runs/x/checkpoints",
        "model": "runs/x/checkpoints/latest/model",
    },
}

PAGE = """\
Training completed successfully!

  before   0.050  [0.034, 0.073]  █▎░░░░░░░░░░░░░░░░░░░░░░  n=500
  after    0.982  [0.966, 0.991]  ███████████████████████▋  n=500
  gain    +0.932

Total time: 95.23 seconds
Total steps: 24
Rows: 7,473 read, 7,470 used, 0 truncated, 0 refused

Output directory: runs/x
Logs: runs/x/logs/train.jsonl
TensorBoard: runs/x/tb
Checkpoints: runs/x/checkpoints
Model: runs/x/checkpoints/latest/model

What to try next:
  Chat with the trained model:
      novarl sample model=runs/x/checkpoints/latest/model
  Compare with another algorithm and another seed:
      novarl rl runs/x/config.yaml run_dir=null algo=grpo seed=1
  See every metric as a curve in the browser:
      tensorboard --logdir runs/x/tb
"""


def test_an_evaluation_shows_its_score_pass_at_k_and_what_failed() -> None:
    after = {"score": 0.25, "interval": [0.1, 0.4], "n": 60, "failed": 4, "pass@1": 0.2, "pass@4": 0.5}
    page = render_summary({"command": "eval", "steps": 0, "before": None, "after": after})
    lines = page.splitlines()
    assert lines[2].startswith("  score    0.250  [0.100, 0.400]") and lines[2].endswith("n=60, 4 failed")
    assert lines[3:5] == ["  pass@1   0.200", "  pass@4   0.500"] and "after" not in page
    page = render_summary({"command": "eval", "after": after | {"pass@4_interval": [0.4, 0.6]}})
    assert page.splitlines()[3:6] == [
        "  pass@1   0.200",
        "  pass@4   0.500  [0.400, 0.600]",
        "  (score: greedy decoding; pass@k: sampled, correct if the reward is at least 1)",
    ]


def test_the_page() -> None:
    assert render_summary(FULL) == PAGE
    assert max(map(len, PAGE.splitlines())) <= 80


def test_what_is_missing_is_left_out() -> None:
    page = render_summary({})
    assert page.startswith("Training completed successfully!\n\nWhat to try next:") or "before" not in page
    assert "Total" not in page
    assert "None" not in page


@pytest.mark.parametrize(("score", "bar"), [(0.0, "░" * 24), (1.0, "█" * 24), (0.5, "█" * 12 + "░" * 12)])
def test_bars(score: float, bar: str) -> None:
    page = render_summary({"after": {"score": score, "interval": [score, score], "n": 2}})
    assert f"  {bar}  n=2\n" in page


@pytest.mark.parametrize("interval", [None, [-math.inf, math.inf]])
def test_a_score_that_is_no_share_has_no_bar_and_an_unknown_interval_is_not_shown(interval: object) -> None:
    page = render_summary({"after": {"score": 12.5, "interval": interval, "n": 1}})
    assert "  after   12.500  n=1\n" in page


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"score": -145.067, "interval": [-150.0, -140.0]}, {"score": 0.25, "interval": [0.1, 0.4]}),
        ({"score": 0.5, "interval": [0.1, 0.9]}, {"score": 0.8, "interval": [0.5, 1.1]}),
        ({"score": 0.5, "interval": [0.1, 0.9]}, {"score": 1.5}),
    ],
)
def test_scores_that_are_not_all_shares_have_no_bars_and_stand_in_a_column(before: Any, after: Any) -> None:
    lines = render_summary({"before": before, "after": after}).splitlines()[2:5]
    assert not any(set("░█") & set(line) for line in lines)
    first, second = (f"{score['score']:.3f}" for score in (before, after))
    assert len({lines[0].index(first) + len(first), lines[1].index(second) + len(second)}) == 1


def commands(**changes: Any) -> list[str]:
    return [command for command, _ in next_steps({**FULL, **changes})]


def test_advice_fits_how_the_run_ended() -> None:
    noise = {"score": 0.06, "interval": [0.04, 0.08], "n": 500}
    assert commands(status="stopped")[0] == "novarl rl runs/x/config.yaml run_dir=runs/x resume=auto"
    assert "stopped early" in render_summary({**FULL, "status": "stopped"})
    assert commands(after=noise)[0] == "novarl rl runs/x/config.yaml run_dir=runs/x resume=auto steps=48"
    assert "runs/x/events.jsonl" in commands(rows={"read": 9, "refused": 1})[0]
    kept = {**FULL["paths"], "rollouts": "runs/x/rollouts"}
    flat = commands(after=noise, rollouts={"sampled": 64, "failed": 0, "flat": True}, paths=kept)
    assert flat[0] == "tail runs/x/rollouts/*.jsonl", "longer training teaches nothing where nothing differs"
    assert not any("steps=48" in command for command in flat)
    failed = {"sampled": 1200, "failed": 31, "flat": False}
    assert commands(rollouts=failed)[0] == "grep failed_rollout runs/x/events.jsonl"
    assert "Failed rollouts (excluded from training): 31 of 1,200\n" in render_summary({**FULL, "rollouts": failed})
    assert "excluded" not in render_summary({**FULL, "rollouts": {**failed, "failed": 0}})
    said = "reward 'mine' raised KeyError: 'x' (/home/me/mine.py, line 3)"
    assert f"1,200\n  First error: {said}\n" in render_summary({**FULL, "rollouts": failed, "first_failure": said})
    assert "novarl rl task=sort model=runs/x/checkpoints/latest/model" in commands(command="sft")
    assert "novarl rl runs/x/config.yaml run_dir=null algo=rloo seed=1" in commands(algo="grpo", other_algo="rloo")
    fits = commands(algo="ppo", other_algo="reinforce")
    assert "novarl rl runs/x/config.yaml run_dir=null algo=reinforce seed=1" in fits
    assert "novarl rl runs/x/config.yaml run_dir=null seed=1" in commands(algo="ppo", other_algo=None)
    assert "novarl rl data=rows.jsonl reward=mine.py:reward_fn model=runs/x/checkpoints/latest/model" in commands(
        command="sft", task=None
    )


def test_a_run_whose_score_fell_is_no_success_and_the_best_checkpoint_is_named() -> None:
    lower = {"score": 0.01, "interval": [0.0, 0.02], "n": 500}
    fell: dict[str, Any] = {**FULL, "before": FULL["after"], "after": lower, "lr": 2e-5}
    best = "runs/x/checkpoints/best/model"
    page = render_summary({**fell, "paths": {**FULL["paths"], "best": best}})
    assert page.startswith("Training ended, but the held-out score is lower than before.\n")
    assert f"Best model: {best}\n" in page
    told = [command for command, _ in next_steps({**fell, "paths": {**FULL["paths"], "best": best}})]
    assert told[:2] == [f"novarl sample model={best}", "novarl rl runs/x/config.yaml run_dir=null optim.lr=7e-06"]
    assert not any("best" in command for command, _ in next_steps(fell)), "where none was better, none is named"
    overlapping = {**fell, "after": {**lower, "interval": [0.0, 0.97]}}
    assert render_summary(overlapping).startswith("Training completed successfully!")
    assert render_summary({**fell, "status": "stopped"}).startswith("Training was stopped early")


def test_advice_names_only_what_was_written() -> None:
    assert commands(command="eval", paths={"run_dir": "r", "samples": "r/samples.md"}) == ["less r/samples.md"]
    written = {name: path for name, path in FULL["paths"].items() if name != "tensorboard"}
    assert not any("tensorboard" in command for command in commands(paths=written))
    flat = {"sampled": 64, "failed": 0, "flat": True}
    assert commands(rollouts=flat)[0] == "novarl rl runs/x/config.yaml run_dir=null log.rollouts_every=1"
    assert "What to try next" not in render_summary({"command": "eval"})


def test_what_stands_out_is_said_and_nobody_is_told_to_train_longer() -> None:
    dead = FULL | {
        "after": {"score": 0.06, "interval": [0.04, 0.09], "n": 500},
        "findings": [
            {"sign": "entropy_collapse", "said": "entropy went from 2 to 0.01 nats a token, and " + "so on " * 20}
        ],
        "lr": 1e-3,
        "usual_lr": 5e-4,
    }
    page = render_summary(dead)
    assert "Warnings:\n- entropy went from 2" in page and "resume=auto" not in page
    assert max(map(len, page.splitlines())) <= 80
    assert next_steps(dead)[0] == (
        "novarl rl runs/x/config.yaml run_dir=null optim.lr=0.0003",
        "lower the learning rate to about a third",
    )
    fast = dead | {"lr": 0.5, "findings": [{"sign": "kl_explosion", "said": "far"}]}
    assert next_steps(fast)[0][0].endswith("optim.lr=0.0005")
    loud = dead | {"entropy_coef": 2.0, "findings": [{"sign": "entropy_rise", "said": "apart"}]}
    assert next_steps(loud)[0][0].endswith("entropy.coef=0")


def test_the_next_command_names_the_rows_and_the_model_of_this_one() -> None:
    trained = {"command": "sft", "data": "data=chat.jsonl prompt_key=question", "paths": {"model": "runs/x/m"}}
    (after,) = (command for command, _ in next_steps(trained) if command.startswith("novarl rl"))
    assert after == "novarl rl data=chat.jsonl prompt_key=question reward=mine.py:reward_fn model=runs/x/m"
    judged = {
        "command": "rm",
        "loss": "bt",
        "data": "data=pairs.jsonl",
        "base": "small",
        "paths": {"run_dir": "runs/y"},
    }
    (after,) = (command for command, _ in next_steps(judged) if command.startswith("novarl rl"))
    assert after == "novarl rl data=pairs.jsonl model=small reward=model:runs/y"


def test_after_a_run_with_python_objects_the_advice_is_a_call() -> None:
    told = commands(from_python=True, status="stopped")
    assert told[0] == "novarl.RL(…, run_dir='runs/x', resume='auto').run()"
    assert "novarl.RL(…, algo='grpo', seed=1).run()" in told
    low = commands(from_python=True, findings=[{"sign": "low_lr", "said": ""}], lr=1e-9, usual_lr=5e-4)
    assert "novarl.RL(…, **{'optim.lr': 0.0005}).run()" in low


def test_a_score_that_could_not_be_measured_is_unknown() -> None:
    nothing = {"score": math.nan, "interval": ["-inf", "inf"], "n": 0, "failed": 1}
    page = render_summary({**FULL, "before": nothing, "after": nothing})
    assert "nan" not in page and "unknown (no answer could be scored)" in page
