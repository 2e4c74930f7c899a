"""We and our peers side by side on this machine: `make bench`, or one workload of it, `make bench WORKLOAD=W2`.

Every side of a workload runs once a round, in a process of its own, and the next begins when it has ended. The last
line printed of each workload is one JSON object; docs/results/performance.md keeps the newest of every workload, and
`--page performance-NAME` another page, such as that of another machine. A GPU has its own (`--device cuda`).
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import report
from benchmarks.floors import Rates, name_of
from benchmarks.performance_page import load, medians, number_said, write
from benchmarks.sides import Place, Run
from benchmarks.workloads import WORKLOADS, Goal, Workload, on
from novarl.core.errors import NovaError
from novarl.run.machine import pick_device

DRAWS = 4000
"""Bootstrap resamples of an interval."""
CLOSE = 1.25
"""Ways to split a batch that are this close to the fastest in the first round go on to the next, since one round is
noisy."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prefix", default="", help="before every command, such as 'taskset -c 0,1'")
    parser.add_argument(
        "--again", nargs="+", default=[], help="measure these sides alone; the others' numbers are kept"
    )
    parser.add_argument("--page", help="the file in docs/results that keeps what is measured")
    parser.add_argument("--home", type=Path, default=Path("runs/bench"), help="models, data and the runs themselves")
    arguments = parser.parse_args()
    page = arguments.page or ("performance" if arguments.device == "cpu" else "performance-gpu")
    try:
        if arguments.rounds < 1:
            raise NovaError(f"must be at least 1, got {arguments.rounds}", where="--rounds", fix="5 is the default")
        workloads = offered(arguments.device, arguments.workload)
        again, here = arguments.again, machine(arguments.device)
        past = {name: kept_record(name, w.sides, again, page, here) for name, w in workloads.items() if again}
    except NovaError as error:
        print(error, file=sys.stderr)
        return 2
    compileall.compile_dir("novarl", quiet=1)  # as pip did for the peers when it installed them
    met = True
    for name in workloads:
        home, threads = arguments.home.absolute(), int(os.environ.get("OMP_NUM_THREADS", "2"))
        place = Place(home, home / name, 0, arguments.device, threads, arguments.prefix)
        record = measure(name, workloads[name], place, rounds=arguments.rounds, again=again, kept=past.get(name))
        write(page, merged(load(page), name, record))
        print(json.dumps(line(name, record)), flush=True)
        met &= all(goal["met"] for goal in record["goals"].values() if goal["met"] is not None)
    return 0 if met else 1


def offered(device: str, wanted: Sequence[str] | None) -> dict[str, Workload]:
    """The workloads of those names, or all that the device can show. NovaError: this machine or device cannot."""
    pick_device(device)
    able = on(device)
    for name in wanted or ():
        if name not in able:
            raise NovaError(f"{name} is not for it", where=f"--device {device}", fix=f"one of {', '.join(able)}")
    return {name: able[name] for name in wanted or able}


def machine(device: str) -> dict[str, Any]:
    """What the numbers are measured on, the GPU as `device`."""
    return report.machine() | {"device": name_of(device)}


def kept_record(
    name: str, sides: Collection[str], again: Sequence[str], page: str, here: Mapping[str, Any]
) -> dict[str, Any]:
    """What the page holds of a workload, some of whose sides are measured again. NovaError: it cannot be kept, since it
    is not there, or another machine's: a ratio of times that two machines took says nothing."""
    if unknown := sorted(set(again) - set(sides)):
        raise NovaError(f"{name} has no side {unknown[0]!r}", where="--again", fix=f"one of {', '.join(sides)}")
    found: dict[str, Any] | None = load(page).get(name)
    if found is None:
        raise NovaError(f"{page} holds nothing of {name} yet", where="--again", fix="measure it whole, without --again")
    past, now = (f"{about['processor']}, {about['device']}" for about in (found["machine"], here))
    if past != now:
        raise NovaError(
            f"the other sides of {name} were measured on {past}, and this is {now}",
            where="--again",
            fix="leave --again out, or name a page of this machine: --page performance-NAME",
        )
    return found


def measure(
    name: str,
    workload: Workload,
    place: Place,
    *,
    rounds: int,
    again: Sequence[str] = (),
    kept: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All rounds of a workload. The first runs every side; later ones those that goals are about, each beginning with
    another, so that none gains by its place."""
    runs: dict[str, list[Run]] = {side: [] for side in workload.sides}
    if kept is not None:
        runs |= {side: [Run(**run) for run in past] for side, past in kept["runs"].items() if side not in again}
    looks = [_rates(place)]
    for number in range(rounds):
        wanted = [side for side in workload.sides if kept is None or side in again]
        if number > 0:
            wanted = [side for side in wanted if side in _needed(workload, runs)]
        first = number % max(1, len(wanted))
        for side in wanted[first:] + wanted[:first]:
            stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{side.replace(' ', '-')}"
            here = replace(place, out=place.out / stamp, round=number)
            found = workload.sides[side](here)
            runs[side].append(found)
            print(f"{name} round {number + 1}: {side:13}", _said(workload, found), flush=True)
            shutil.rmtree(here.out)  # checkpoints of some rounds would fill a disk
        looks.append(_rates(place))
    rates = [before.better(after) for before, after in pairwise(looks)]
    floors = {side: _floored(workload, side, place, runs, rates) for side in workload.floors}
    best = winner(workload, runs)
    goals = {goal.name: judge(goal, runs, best) for goal in workload.goals}
    for goal in workload.goals:
        if not goal.impossible and (factor := floor_factor(goal, runs)) is not None:
            goals[goal.name]["at_floor"] = goals[goal.name]["value"] * factor
    return {
        "date": str(date.today()),
        "rounds": rounds,
        "best": best,
        "goals": goals,
        "floors": floors,
        "rates": {name: median(asdict(found)[name] for found in rates) for name in asdict(rates[0])},
        "again": list(again),
        "threads": place.threads,
        "machine": machine(place.device),
        "runs": {side: [asdict(run) for run in past] for side, past in runs.items()},
    }


def contenders(workload: Workload, runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Who can still be "best": in the first round within CLOSE of the fastest."""
    first = {side: runs[side][0].numbers[workload.scout] for side in workload.best}
    return [side for side, number in first.items() if number <= CLOSE * min(first.values())]


def winner(workload: Workload, runs: Mapping[str, Sequence[Run]]) -> str:
    """The fastest contender over all rounds; empty where none compete."""
    known = contenders(workload, runs)
    return min(known, key=lambda side: median(run.numbers[workload.scout] for run in runs[side]), default="")


def _needed(workload: Workload, runs: Mapping[str, Sequence[Run]]) -> set[str]:
    """The sides that goals are about, and those among which "best" is still to be found."""
    sides = {side for goal in workload.goals for side in (goal.side, goal.over) if side}
    return (sides - {"best"}) | set(contenders(workload, runs))


def judge(goal: Goal, runs: Mapping[str, Sequence[Run]], best: str) -> dict[str, Any]:
    """The goal's value with its interval, and whether it is met; None where the machine cannot show it."""
    bound = goal.at_least if goal.at_least is not None else goal.at_most
    assert bound is not None
    found: dict[str, Any] = {"goal": bound, "direction": "at least" if goal.at_least is not None else "at most"}
    if goal.impossible:
        return {"value": None, "interval": None, **found, "met": None, "why": goal.impossible}
    sides = [best if side == "best" else side for side in (goal.side, goal.over) if side]
    columns = [[run.numbers[goal.number] for run in runs[side]] for side in sides]
    value, low, high = ratio_of_medians(*columns)
    met = value >= bound if goal.at_least is not None else value <= bound
    return {"value": value, "interval": [low, high], **found, "met": met}


def ratio_of_medians(
    above: Sequence[float], below: Sequence[float] | None = None, *, seed: int = 0
) -> tuple[float, float, float]:
    """median(above) / median(below) and its 95 % bootstrap interval; of one column alone, its median's.

    Rounds are resampled together where both columns have as many, so that what slowed a whole round cancels.
    """
    if below is None:
        below = [1.0] * len(above)
    rng, paired = random.Random(seed), len(above) == len(below)
    drawn = []
    for _ in range(DRAWS):
        left = rng.choices(range(len(above)), k=len(above))
        right = left if paired else rng.choices(range(len(below)), k=len(below))
        drawn.append(median(above[i] for i in left) / median(below[i] for i in right))
    drawn.sort()
    return median(above) / median(below), drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS)]


def _floored(
    workload: Workload, side: str, place: Place, runs: Mapping[str, list[Run]], rates: Sequence[Rates]
) -> dict[str, float]:
    """A side's least seconds, in all and of its parts; notes in each of its runs what share of them was reached."""
    floors = []
    for index, run in enumerate(runs[side]):
        # Fewer rounds of another side than of this one, where one was measured again: its last stands for the rest.
        together = {other: past[min(index, len(past) - 1)] for other, past in runs.items() if past}
        floors.append(workload.floors[side](place.home, together, rates[min(index, len(rates) - 1)]))
        run.numbers |= {f"{part}_share": least / run.numbers[part] for part, least in floors[-1].items()}
    return {part: fmean(floor[part] for floor in floors) for part in floors[0]}


def floor_factor(goal: Goal, runs: Mapping[str, Sequence[Run]]) -> float | None:
    """What the goal's value would be multiplied by, were the side of it that has a floor there."""
    share = f"{'seconds' if goal.number == 'seconds_per_token' else goal.number}_share"
    for side, power in ((goal.side, 1), (goal.over, -1)):
        found = [run.numbers[share] for run in runs.get(side, ()) if share in run.numbers]
        if found:
            return float(median(found) ** power)
    return None


def line(name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """What is printed last: the workload in one JSON object. `ratio` is the value of its first goal."""
    first = next(iter(record["goals"].values()))
    middle = {side: medians(runs) for side, runs in record["runs"].items()}
    peers = {side: middle[side] | runs[-1]["about"] for side, runs in record["runs"].items() if side != "ours"}
    goals = {
        goal: {"value": found["value"], "goal": found["goal"], "met": found["met"]}
        for goal, found in record["goals"].items()
    }
    return {
        "workload": name,
        "ratio": first["value"],
        "ratio_interval": first["interval"],
        "goals": goals,
        "ours": middle["ours"],
        "peer": {"best": record["best"], **peers},
        "floor": record["floors"],
        "threads": record["threads"],
        "machine": record["machine"],
    }


def merged(page: Mapping[str, Any], name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """The page with this workload's record in its place, the others untouched, in the order of WORKLOADS."""
    all_of_them = {**page, name: record}
    return {known: all_of_them[known] for known in WORKLOADS if known in all_of_them}


def _said(workload: Workload, run: Run) -> str:
    return "  ".join(f"{name} {number_said(name, run.numbers[name])}" for name in workload.shown if name in run.numbers)


def _rates(place: Place) -> Rates:
    """What the machine can do now, in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": str(place.threads), "MKL_NUM_THREADS": str(place.threads)}
    words = [*shlex.split(place.prefix), sys.executable, "-m", "benchmarks.floors", place.device]
    said = subprocess.run(words, text=True, capture_output=True, check=True, env=environment).stdout
    return Rates(**json.loads(said.splitlines()[-1]))


if __name__ == "__main__":
    raise SystemExit(main())
