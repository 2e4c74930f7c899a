"""The smoke run over three seeds, in float32 and in bfloat16, and with rewards that say nothing: `make bench-smoke`."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.runs import novarl, summary

HERE = Path(__file__).resolve().parent
ARMS = {
    "verifier": [],
    "verifier, bfloat16": ["dtype=bfloat16"],
    "shuffled": [f"reward={HERE / 'shuffled_reward.py'}:reward_func"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    rows: list[list[Any]] = []
    data: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for arm, extra in ARMS.items():
            for seed in arguments.seeds:
                run_dir = Path(scratch) / (f"smoke-{len(data)}" if data else "smoke")
                said = novarl("demo", f"seed={seed}", f"run_dir={run_dir}", *extra).stdout
                if not rows:  # what the README shows
                    report.RESULTS.mkdir(parents=True, exist_ok=True)
                    (report.RESULTS / "smoke.txt").write_text(said.replace(str(run_dir), "runs/demo"))
                    shutil.copy(run_dir / "figures" / "curves.png", report.RESULTS / "smoke.png")
                found = summary(run_dir)
                before, after = found["before"]["score"], found["after"]["score"]
                fine = abs(after - before) <= 0.05 if arm == "shuffled" else after - before >= 0.60
                rows.append([arm, seed, before, after, after - before, found["seconds"], "yes" if fine else "NO"])
                data.append({"arm": arm, "seed": seed, "met": fine, **found})
                print(*rows[-1])
    body = (
        "Greedy accuracy on 500 held-out rows of `task=sort` before and after the RL phase. Goal with the "
        "verifier: a rise of "
        "at least 0.60. Goal with the same rewards shuffled across the batch: a change of at most 0.05.\n\n"
        + report.table(["reward", "seed", "before", "after", "change", "seconds", "goal met"], rows)
    )
    report.write("smoke", "The smoke run", body, {"runs": data})
    return 0 if all(item["met"] for item in data) else 1


if __name__ == "__main__":
    raise SystemExit(main())
