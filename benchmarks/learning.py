"""Every row of the table of algorithms lifts a held-out split from its supervised start: `make bench-learning`.

Each seed has one start, the warm-up of `task=sort`, from which every algorithm goes on with its own defaults. The same
run with all advantages set to 0 must not pass.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks import report
from benchmarks.runs import metrics, novarl, summary
from novarl.algos.named import ALGORITHMS

RISE = 0.20
"""The least rise of greedy accuracy, on average over the seeds."""
STUDENT = {1: math.inf, 2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""The 97.5 % quantile of Student's t by the number of seeds."""
SLOW = ("critic", "continuations")
"""Suppliers of values that are allowed six minutes instead of three; process rewards are too."""
STEPS = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algo", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=3, choices=STUDENT)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, each with OMP_NUM_THREADS threads")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.at_once) as pool:
        home = Path(scratch)
        starts = list(pool.map(lambda seed: start(home, seed), range(arguments.seeds)))
        wanted = [(name, seed, True) for name in arguments.algo for seed in range(arguments.seeds)]
        wanted += [(name, 0, False) for name in arguments.algo]
        found = list(pool.map(lambda one: train(home, starts[one[1]], *one), wanted))
    runs = {name: [run for run in found if run["algo"] == name and run["credit"]] for name in arguments.algo}
    empty = {run["algo"]: run for run in found if not run["credit"]}
    rows = [judge(runs[name], empty[name]) for name in arguments.algo]
    body = (
        f"Greedy accuracy on 500 held-out rows of `task=sort`, {arguments.seeds} seeds, {STEPS} steps of 16 prompts "
        "with 8 answers, every algorithm with its own defaults from the same supervised start. The interval is "
        f"Student's, over seeds. Goal: a rise of at least {RISE}, its interval above 0, at most 180 s a run (360 s "
        "with a critic, continuations or process rewards), and no rise where all advantages are set to 0 (last "
        "column).\n\n"
        + report.table(
            ["algorithm", "before", "after", "rise", "95 % interval", "seconds", "goal met", "rise without credit"],
            [row["cells"] for row in rows],
        )
        + "\n\n![Curves](learning.png)\n\nMean reward of the sampled answers by step, the mean over seeds."
    )
    draw(runs, report.RESULTS / "learning.png")
    report.write(
        "learning",
        "Every algorithm learns",
        body,
        {"runs": found, "met": {row["algo"]: row["met"] for row in rows}, "seconds": time.perf_counter() - began},
    )
    return 0 if all(row["met"] for row in rows) else 1


def start(home: Path, seed: int) -> Path:
    """The supervised start of a seed: the model after the task's warm-up."""
    novarl("rl", "task=sort", f"seed={seed}", "steps=1", f"run_dir={home / f'start-{seed}'}", "eval.n=1")
    (warm,) = (home / f"start-{seed}" / "checkpoints").glob("warmup-*")
    return warm / "model"


def train(home: Path, model: Path, name: str, seed: int, credit: bool) -> dict[str, Any]:
    """One run; without `credit` all its advantages are 0."""
    run_dir = home / f"{name}-{seed}{'' if credit else '-none'}"
    words = [
        "rl",
        "task=sort",
        f"model={model}",
        f"algo={name}",
        f"seed={seed}",
        f"steps={STEPS}",
        f"run_dir={run_dir}",
    ]
    module = "novarl" if credit else "benchmarks.without_credit"
    quiet = ["log.tensorboard=false", "log.console=false", "save_every=null"]
    command = [sys.executable, "-m", module, *words, *quiet]
    done = subprocess.run(command, text=True, capture_output=True, check=False, env=dict(os.environ))
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    said, steps = summary(run_dir), {int(record["step"]): record for record in metrics(run_dir)}
    found = {
        "algo": name,
        "seed": seed,
        "credit": credit,
        "before": said["before"]["score"],
        "after": said["after"]["score"],
        "seconds": said["seconds"],
        "reward": [record["reward_raw_mean"] for _, record in sorted(steps.items())],
    }
    print(json.dumps({key: value for key, value in found.items() if key != "reward"}), flush=True)
    return found


def judge(runs: Sequence[Mapping[str, Any]], empty: Mapping[str, Any]) -> dict[str, Any]:
    """The row of the report, and whether its goal is met."""
    row = ALGORITHMS[runs[0]["algo"]]
    rises = [run["after"] - run["before"] for run in runs]
    rise, slack = fmean(rises), STUDENT[len(rises)] * (stdev(rises) / math.sqrt(len(rises)) if rises[1:] else 1.0)
    limit = 360 if row.values in SLOW or "process" in row.needs else 180
    seconds, none = max(run["seconds"] for run in runs), empty["after"] - empty["before"]
    met = rise >= RISE and rise - slack > 0 and seconds <= limit and none < RISE
    before, after = (fmean(run[name] for run in runs) for name in ("before", "after"))
    interval = f"{rise - slack:.3f} to {rise + slack:.3f}"
    cells = [row.name, before, after, rise, interval, f"{seconds:.0f}", "yes" if met else "NO", none]
    return {"algo": row.name, "met": met, "cells": cells}


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """A small panel of each algorithm's curve, the others pale behind it."""
    from matplotlib.figure import Figure

    curves = {
        name: [fmean(step) for step in zip(*(run["reward"] for run in mine), strict=False)]
        for name, mine in runs.items()
    }
    columns = min(5, len(curves))
    lines = -(-len(curves) // columns)
    figure = Figure(figsize=(2.4 * columns, 1.9 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat
    for panel, (name, curve) in zip(axes, curves.items(), strict=False):
        for other in curves.values():
            panel.plot(other, color="0.88", linewidth=0.8)
        panel.plot(curve, color="tab:blue", linewidth=1.8)
        panel.set_title(name, fontsize=9)
        panel.set_ylim(-0.02, 1.02)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(axes)[len(curves) :]:
        panel.set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean reward", fontsize=9)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    raise SystemExit(main())
