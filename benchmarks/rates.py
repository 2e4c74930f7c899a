"""How many steps of W4 each side takes at which learning rate, so that each has the one that serves it: `make
bench-rates`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks import report
from benchmarks.reaching import ENOUGH, EVERY, MOST, NotReachedError, until_good_ours, until_good_trl
from benchmarks.sides import Place, Side

RATES = (5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3)
SIDES: dict[str, Callable[[float], Side]] = {
    "ours": lambda rate: until_good_ours(rate=rate),
    "ours, one step ahead": lambda rate: until_good_ours("rollout.staleness=1", rate=rate),
    "TRL": lambda rate: until_good_trl(128, rate=rate),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--prefix", default="", help="before every command, such as 'taskset -c 0,1'")
    parser.add_argument("--home", type=Path, default=Path("runs/bench"), help="models, data and the runs themselves")
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[int | None]]] = {name: {} for name in SIDES}
    for rate in RATES:
        for number, (name, side) in enumerate(SIDES.items()):
            home = arguments.home.absolute()
            steps: list[int | None] = []
            for seed in range(arguments.seeds):
                place = Place(home, home / "rates" / f"{number}-{rate:g}-{seed}", seed, prefix=arguments.prefix)
                try:
                    steps.append(int(side(rate)(place).numbers["steps"]))
                except NotReachedError as never:
                    print(never, flush=True)
                    steps.append(None)
            found[name][f"{rate:g}"] = steps
            print(name, f"{rate:g}", steps, flush=True)
    rows = [
        [rate, *(f"{_middle(found[name][rate])} ({_said(found[name][rate])})" for name in SIDES)]
        for rate in found["ours"]
    ]
    table = report.table(["learning rate", *SIDES], rows)
    body = (
        f"Steps until {ENOUGH:.0%} of 500 held-out rows are right, looked at every {EVERY} steps, from one checkpoint: "
        f"the median, and each seed. A dash: not in {MOST} steps.\n\n{table}"
    )
    report.write("rates", "The learning rates of W4", body, {"steps": found})
    return 0


def _middle(steps: list[int | None]) -> str:
    middle = median(MOST + 1 if step is None else step for step in steps)
    return "-" if middle > MOST else f"{middle:g}"


def _said(steps: list[int | None]) -> str:
    return ", ".join("-" if step is None else str(step) for step in steps)


if __name__ == "__main__":
    raise SystemExit(main())
