"""Every row of the table of algorithms on every built-in text task, with the defaults of both: `make bench-tasks`.

Each task has one start, the tiny model after warm-up; from it each algorithm takes a few steps on a few
prompts. That is too little to see learning (`make bench-learning` does), and enough to see that the pair works: no
error, every number finite, rewards that differ within groups, a gradient, weights that have moved.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.runs import metrics
from novarl.algos.named import ALGORITHMS
from novarl.core.errors import NovaError
from novarl.tasks.registry import TASKS

STEPS, PROMPTS = 3, 4
WARMUP = {"lexical": 50, "sentiment": 50}
"""Where the whole warm-up is long and a part of it gives rewards that differ; the other tasks have all of theirs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algo", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--runs", type=Path, help="a folder to keep runs in; those that it holds are not run again")
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side, each with OMP_NUM_THREADS threads")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(arguments.at_once, mp_context=get_context("spawn")) as pool,
    ):
        home = arguments.runs or Path(scratch)
        starts = dict(zip(arguments.task, pool.map(partial(start, home), arguments.task), strict=True))
        # Task by task from the dearest algorithm on, so that no worker waits for one long run at the end.
        wanted = list(product(arguments.task, sorted(arguments.algo, key=lambda name: -cost(name))))
        found = list(pool.map(partial(run, home, starts), wanted))
    cells = {(one["algo"], one["task"]): one for one in found}
    table = report.table(
        ["algorithm", *arguments.task],
        [[algo, *(shown(cells[algo, task]) for task in arguments.task)] for algo in arguments.algo],
    )
    troubles = [f"* `algo={one['algo']} task={one['task']}`: {one['trouble']}" for one in found if one["trouble"]]
    body = (
        f"{STEPS} steps of {PROMPTS} prompts with the tiny model after warm-up on the task, all other settings at "
        "their defaults. Each cell: the mean reward over the steps, the share of groups whose rewards differ, the "
        "largest change of a weight. A pair that does not run, has no differing rewards, no gradient or unchanged "
        f"weights is listed below.\n\n{table}\n\n" + ("\n".join(troubles) or "Every pair works.")
    )
    report.write(
        "every-task", "Every algorithm on every task", body, {"runs": found, "seconds": time.perf_counter() - began}
    )
    return 1 if troubles else 0


def cost(algo: str) -> int:
    """A rough order of how long an algorithm's step takes."""
    row = ALGORITHMS[algo]
    return 100 * (row.values == "continuations") + 10 * ("process" in row.needs) + row.updates_per_rollout


def train(*words: str) -> Mapping[str, Any]:
    """`novarl rl words...` in this process, without a word; returns its summary."""
    from novarl.compose import run_training
    from novarl.config.load import load
    from novarl.config.tree import RLConfig

    quiet = ("log.console=false", "log.tensorboard=false", "log.rollouts_every=null", "eval.n=1")
    return run_training(load(RLConfig, overrides=[*words, *quiet, f"threads={os.environ.get('OMP_NUM_THREADS', 1)}"]))


def start(home: Path, task: str) -> Path:
    """The tiny model after the task's warm-up."""
    folder = home / f"start-{task}"
    if not (folder / "summary.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was broken off
        part = [f"warmup={WARMUP[task]}"] if task in WARMUP else []
        train(f"task={task}", "steps=1", "prompts_per_rollout=1", f"run_dir={folder}", *part)
    (warm,) = (folder / "checkpoints").glob("warmup-*")
    return warm / "model"


def run(home: Path, starts: Mapping[str, Path], pair: tuple[str, str]) -> dict[str, Any]:
    """A few steps of one pair, and what is wrong with them, if anything."""
    task, algo = pair
    began, folder = time.perf_counter(), home / f"{task}-{algo}"
    record = folder.with_suffix(".json")
    if record.is_file():
        known: dict[str, Any] = json.loads(record.read_text())
        return known
    shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, Any] = {"algo": algo, "task": task, "trouble": ""}
    try:
        train(
            f"task={task}",
            f"algo={algo}",
            f"model={starts[task]}",
            f"steps={STEPS}",
            f"prompts_per_rollout={PROMPTS}",
            f"run_dir={folder}",
            "save_every=null",
        )
    except NovaError as refused:
        found["trouble"] = f"refused: {refused}"
    else:
        records = metrics(folder)
        groups = sum(record["groups_kept"] for record in records)
        found["reward"] = sum(record["reward_raw_mean"] for record in records) / len(records)
        found["varied"] = 1.0 - sum(record["zero_variance_groups"] for record in records) / groups
        found["moved"] = distance(starts[task], folder / "checkpoints" / "latest" / "model")
        found["trouble"] = trouble(found, records)
    found["seconds"] = time.perf_counter() - began
    record.write_text(json.dumps(found))
    print(json.dumps(found), flush=True)
    return found


def trouble(found: Mapping[str, Any], records: list[dict[str, Any]]) -> str:
    """What is wrong with a run that ended, in a few words."""
    strange = {
        name
        for record in records
        for name, value in record.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    if strange:
        return f"not finite: {', '.join(sorted(strange))}"
    if len({record["step"] for record in records}) != STEPS:
        return "not every step has a record"
    if found["varied"] == 0.0:
        return "no group has rewards that differ"
    if not any(record["grad_norm"] > 0.0 for record in records):
        return "there was no gradient"
    return "" if found["moved"] > 0.0 else "the weights have not moved"


def distance(one: Path, other: Path) -> float:
    """The largest difference between the weights of two models."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def shown(found: Mapping[str, Any]) -> str:
    if "moved" not in found:
        return "NO"
    mark = " NO" if found["trouble"] else ""
    return f"{found['reward']:.2f}, {found['varied']:.0%}, {found['moved']:.4f}{mark}"


if __name__ == "__main__":
    raise SystemExit(main())
