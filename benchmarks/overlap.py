"""Sampling and learning overlapped against one after the other: seconds to the same score on `task=sort`.

Both sides start from the supervised checkpoint of W4 and stop at the first measured step with a greedy score of ENOUGH
on 500 held-out rows. A run is bit-reproducible, so one with evaluations finds that step and the same one without any is
timed, from process start. Three ways to use a machine:

    alone      one process, one thread: the other core is free, and nobody uses it
    threads    one process, two threads
    overlap    two processes with a thread each (`rollout.staleness=1`)

`overlap` over `alone` is what a free core is worth when it samples; over `threads`, whether it is better used that way
than by more threads. `seconds` of a step say the same without the steps that old samples cost.

    python -m benchmarks.overlap --seeds 3 --prefix "taskset -c 0,1"
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from benchmarks import report
from benchmarks.reaching import ENOUGH, EVERY, start
from benchmarks.sides import Place, Run

SIDES: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, ()),
    "threads": (2, ()),
    "overlap": (2, ("rollout.staleness=1",)),
}
"""Threads in all, and what a run is told besides."""
TRIED = (30, 120)
"""Steps of the runs that look for the step at which the score is ENOUGH."""
GOAL = 0.8
ABOUT = f"""\
Seconds from process start to a greedy score of {ENOUGH:.0%} on 500 rows of `task=sort`, from one supervised checkpoint,
medians over seeds; the step is found by a run with evaluations and timed in one without. `alone`: one process, one
thread, the other core free. `threads`: one process, two threads. `overlap`: `rollout.staleness=1`, two processes with a
thread each. Ratios are taken seed by seed. `rollout seconds`: what a step waits for its answers."""


def steps_to(place: Place, words: Sequence[str]) -> int:
    """The first measured step with a score of ENOUGH; with one thread a process, as threads change only rounding."""
    for most in TRIED:
        log, _ = _run(
            place, f"to-{most}", 2 if words else 1, words, f"steps={most}", f"eval_every={EVERY}", "eval.n=500"
        )
        good = (int(line["step"]) for _, line in log if line.get("eval/score", 0.0) >= ENOUGH)
        if (steps := next(good, None)) is not None:
            return steps
    raise SystemExit(f"seed {place.round} did not reach {ENOUGH:.0%} in {TRIED[-1]} steps with {' '.join(words)}")


def timed(place: Place, threads: int, words: Sequence[str], steps: int) -> Run:
    """Seconds from process start to the end of that step, without evaluations."""
    log, began = _run(place, f"timed-{threads}", threads, words, f"steps={steps}", "eval.n=1")
    times = [time - began for time, _ in log]
    waited = sum(line["time/rollout_s"] for _, line in log[1:]) / max(1, steps - 1)
    step = (times[-1] - times[0]) / max(1, steps - 1)
    return Run({"seconds": times[-1], "steps": float(steps), "step_seconds": step, "rollout_seconds": waited})


def _run(
    place: Place, name: str, threads: int, words: Sequence[str], *more: str
) -> tuple[list[tuple[float, dict[str, float]]], float]:
    """(the lines of metrics.jsonl with their times, when it began)."""
    here = replace(place, out=place.out / name, threads=threads)
    fixed = ["rl", "task=sort", f"model={start(place)}", f"seed={place.round}", f"run_dir={here.out / 'run'}"]
    command = [sys.executable, "-m", "novarl", *fixed, f"threads={threads}", "save_every=null", "keep_best=false"]
    found = here.run([*command, *words, *more], [here.out / "run" / "metrics.jsonl"], ours=True)
    return found.lines, found.started


def ratios(runs: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Medians over seeds of overlap's number over the other side's, seed by seed."""
    found = {}
    for other in ("alone", "threads"):
        for number in ("seconds", "step_seconds", "steps"):
            pairs = zip(runs["overlap"], runs[other], strict=True)
            found[f"{number} over {other}"] = median(mine.numbers[number] / its.numbers[number] for mine, its in pairs)
    return found


def measure(home: Path, *, seeds: int = 3, prefix: str = "") -> dict[str, list[Run]]:
    """All sides, seed by seed in turn. `prefix` stands before every command."""
    runs: dict[str, list[Run]] = {name: [] for name in SIDES}
    for seed in range(seeds):
        needed: dict[tuple[str, ...], int] = {}
        for name, (threads, words) in SIDES.items():
            place = Place(home, home / f"{'-'.join(words) or 'synchronous'}-{seed}", seed, "cpu", threads, prefix)
            if words not in needed:
                needed[words] = steps_to(place, words)
            runs[name].append(timed(place, threads, words, needed[words]))
            print(f"seed {seed} {name:8}", json.dumps(runs[name][-1].numbers), flush=True)
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prefix", default="", help="before every command, such as 'taskset -c 0,1'")
    parser.add_argument("--home", type=Path, default=Path("runs/bench/overlap"))
    arguments = parser.parse_args()
    runs = measure(arguments.home.absolute(), seeds=arguments.seeds, prefix=arguments.prefix)
    found = ratios(runs)
    numbers = ("seconds", "steps", "step_seconds", "rollout_seconds")
    rows = [
        [name, *(f"{median(run.numbers[number] for run in past):.3g}" for number in numbers)]
        for name, past in runs.items()
    ]
    sides = report.table(["side", *(number.replace("_", " ") for number in numbers)], rows)
    compared = report.table(
        ["overlap's median ratio", "value"], [[name, f"{value:.2f}"] for name, value in found.items()]
    )
    said = {"ratios": found, "goal": GOAL, "met": found["seconds over alone"] <= GOAL}
    seen = {name: [asdict(run) for run in past] for name, past in runs.items()}
    text = f"{ABOUT}\n\n{sides}\n\n{compared}\n\nGoal: `seconds over alone` at most {GOAL:g}."
    report.write("overlap", "Sampling and learning at the same time", text, {**said, "runs": seen})
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
