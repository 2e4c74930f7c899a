"""Our own speed at another commit and in this tree, in one run: `make bench-against COMMIT=<commit>`.

Each round runs every workload once in either tree, in alternating order. The figure is the median over rounds of this
tree's seconds per token divided by the commit's: below 1 is faster. Both run with this virtualenv.
"""

from __future__ import annotations

import argparse
import compileall
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks import report
from benchmarks.sides import Place
from benchmarks.workloads import LEAN, W1, W2, WHOLE

STEPS = {"W1": W1.ours(*WHOLE), "W2": W2.ours(*LEAN)}
MOST = 1.03
"""How much slower than the commit a workload may be."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--workload", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        then = Path(scratch) / "then"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(then), arguments.commit], check=True)
        try:
            found = {name: measure(name, then, Path(scratch), arguments.rounds) for name in arguments.workload}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(then)], check=True)
    print(json.dumps({"commit": arguments.commit, "machine": report.machine(), "ratios": found}))
    return 0 if all(one["median"] <= MOST for one in found.values()) else 1


def measure(name: str, then: Path, scratch: Path, rounds: int) -> dict[str, float]:
    """The ratio of the two trees' seconds per token, its median and its extremes over the rounds."""
    trees = {"then": then, "now": report.ROOT}
    for tree in trees.values():
        compileall.compile_dir(tree / "novarl", quiet=1)
    ratios = []
    for number in range(rounds):
        seconds = {}
        for side in sorted(trees, reverse=number % 2 == 0):
            place = Place(scratch, scratch / "run", number, prefix=f"env -C {trees[side]}")
            seconds[side] = STEPS[name](place).numbers["seconds_per_token"]
            shutil.rmtree(place.out)
        ratios.append(seconds["now"] / seconds["then"])
        print(f"{name} round {number + 1}: {ratios[-1]:.3f}", file=sys.stderr, flush=True)
    return {"median": median(ratios), "least": min(ratios), "most": max(ratios)}


if __name__ == "__main__":
    sys.exit(main())
