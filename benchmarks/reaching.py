"""W4: the wall clock from process start to 90 % greedy accuracy on held-out rows, without the time of evaluations.

Both sides start from the same supervised checkpoint, take the same prompts in the same order and are measured every
EVERY steps. TRL's evaluations happen in its run and are taken off its clock. Our runs are bit-reproducible, so one with
evaluations finds the step, and the same one without any, which stops there, is timed. Each side has the learning rate
with which it needs the fewest steps (`make bench-rates`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.cases import write_rows
from benchmarks.floors import Rates, Size, floor_seconds
from benchmarks.sides import PEERS, Place, Run, Side, peer_python
from novarl.tasks.registry import find_task

ENOUGH, EVERY, MOST = 0.9, 2, 120
PROMPTS, SAMPLES, LONGEST = 16, 8, 8
OUR_RATE, TRL_RATE = 7e-4, 1e-3
WARMED = "checkpoints/warmup-*/model"


class NotReachedError(SystemExit):
    """A run that ended as it should, but did not get good enough: a clear end, told apart from runs that failed."""


def start(place: Place) -> Path:
    """The checkpoint: the built-in tiny model after the task's warm-up, made once."""
    run_dir = place.home / "start"
    if not list(run_dir.glob(WARMED)):
        words = ["rl", "task=sort", "steps=1", f"run_dir={run_dir}", "eval.n=1", "prompts_per_rollout=1"]
        Place(place.home, place.home / "making", 0, place.device, place.threads, place.prefix).run(
            [sys.executable, "-m", "novarl", *words], [], ours=True
        )
    return next(run_dir.glob(WARMED))


def until_good_ours(*extra: str, rate: float = OUR_RATE) -> Side:
    return lambda place: _ours(place, [*extra, f"optim.lr={rate:g}"])


def _ours(place: Place, extra: Sequence[str]) -> Run:
    model = start(place)

    def run(name: str, *words: str) -> tuple[float, list[tuple[float, dict[str, Any]]]]:
        run_dir = place.out / name
        fixed = ["rl", "task=sort", f"model={model}", f"seed={place.round}", f"run_dir={run_dir}", "save_every=null"]
        found = place.run(
            [sys.executable, "-m", "novarl", *fixed, f"device={place.device}", "keep_best=false", *extra, *words],
            [run_dir / "metrics.jsonl"],
            ours=True,
            until=good,
        )
        return found.started, found.lines

    def good(line: Mapping[str, Any]) -> bool:
        return line.get("eval/score", 0.0) >= ENOUGH

    _, scored = run("scored", f"steps={MOST}", f"eval_every={EVERY}", "eval.n=500")
    if (steps := next((int(line["step"]) for _, line in scored if good(line)), None)) is None:
        raise NotReachedError(f"our run of seed {place.round} did not reach {ENOUGH:.0%} in {MOST} steps")
    began, timed = run("timed", f"steps={steps}", "eval.n=0")
    found = _reached([0.0, *(time - began for time, _ in timed)], steps, {"seed": place.round, "words": list(extra)})
    columns = {"prompt": "prompt_tokens", "answer": "completion_tokens"}
    stages = {"generation": "time/rollout_s", "learn": "time/update_s"}
    means = {name: fmean(line[column] for _, line in timed[1:]) for name, column in (columns | stages).items()}
    found.numbers |= means | {name: means[name] / (PROMPTS * SAMPLES) for name in columns}
    found.numbers["distinct"] = found.numbers["answer"] * fmean(
        distinct_share(path) for path in (place.out / "timed" / "rollouts").glob("*.jsonl")
    )
    return found


def distinct_share(rollouts: Path) -> float:
    """Of the tokens of a step's answers, how many are left if what answers to one prompt begin with counts once."""
    tokens, beginnings = 0, set()
    for line in rollouts.read_text().splitlines():
        answer = json.loads(line)
        ids = tuple(answer["text"].encode()) + (-1,) * (answer["finish_reason"] == "stop")  # a byte is a token
        tokens += len(ids)
        beginnings |= {(answer["group"], ids[:end]) for end in range(1, len(ids) + 1)}
    return len(beginnings) / tokens


def until_good_trl(per_device: int, *, rate: float = TRL_RATE, bf16: bool = False) -> Side:
    def side(place: Place) -> Run:
        task, folder = find_task("sort"), place.out
        train = [{"prompt": row["messages"], "answer": row["answer"]} for row in task.rows("train")]
        held_out = [{"prompt": row["messages"], "answer": row["answer"]} for row in task.rows("held_out")]
        settings = {
            "what": "grpo",
            "model": str(start(place)),
            "out": str(folder),
            "data": str(write_rows(folder / "train.jsonl", train, order="prompts", seed=place.round)),
            "held_out": str(write_rows(folder / "held_out.jsonl", held_out)),
            "enough": ENOUGH,
            "every": EVERY,
            "reward": "is_sorted",
            "trainer": {
                "use_cpu": place.device == "cpu",
                "bf16": bf16,
                "per_device_train_batch_size": per_device,
                "gradient_accumulation_steps": PROMPTS * SAMPLES // per_device,
                "num_generations": SAMPLES,
                "max_completion_length": LONGEST,
                "max_steps": MOST,
                "learning_rate": rate,
                "loss_type": "dr_grpo",
                "scale_rewards": "none",
                "beta": 0.0,
                "shuffle_dataset": False,
                "seed": place.round,
            },
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        command = [peer_python(), str(PEERS / "run_trl.py"), str(folder / "settings.json")]
        found = place.run(command, [folder / "steps.jsonl"], ours=False)
        scores = [(line["at"], line["score"]) for _, line in found.lines if "score" in line]
        if scores[-1][1] < ENOUGH:
            raise NotReachedError(f"TRL's run of seed {place.round} did not reach {ENOUGH:.0%} in {MOST} steps")
        lines = [(time, line) for time, line in found.lines if line.get("step", 0) > 0]
        # A step's own evaluation comes before its line is written, and is in `paused` by then.
        times = [time - line["paused"] - found.started for time, line in lines]
        return _reached([0.0, *times], scores[-1][0], json.loads((folder / "about.json").read_text()))

    return side


def _reached(times: list[float], steps: int, about: dict[str, object]) -> Run:
    """`times[k]` is when step k had ended."""
    numbers = {"seconds": times[steps], "steps": float(steps), "start": times[1]}
    numbers["step_seconds"] = (times[steps] - times[1]) / max(1, steps - 1)
    return Run(numbers, [], about)


def reaching_floor(home: Path, runs: Mapping[str, Run], rates: Rates) -> dict[str, float]:
    """The least seconds: torch imported, then as many steps as ours took, each at the floor of its tokens, of which
    those that answers to one prompt begin with need be computed once."""
    mine = runs["ours"].numbers
    size, answers = Size.of(next((home / "start").glob(WARMED))), [mine["distinct"]] * (PROMPTS * SAMPLES)
    step = floor_seconds(size, rates, round(mine["prompt"]), PROMPTS, answers)["seconds"]
    return {"seconds": rates.torch + mine["steps"] * step, "start": rates.torch + step, "step_seconds": step}


def ahead_floor(home: Path, runs: Mapping[str, Run], rates: Rates) -> dict[str, float]:
    """The least seconds one step ahead: those of the run in turn, if from its second step on whichever of sampling and
    learning is the shorter took no time at all."""
    turn = runs["in turn"].numbers
    return {"seconds": turn["start"] + (turn["steps"] - 1) * max(turn["generation"], turn["learn"])}
