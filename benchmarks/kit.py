"""The RLHF Systems Kit's commands, with its numbers, for several seeds: `make bench-kit`.

Each run must do what the kit promises of it: learn, in the promised time. It has learnt where its weights moved and the
interval of its held-out score after training lies above that of the score before.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import report
from benchmarks.runs import metrics, summary

COMMANDS = {
    "smoke": ("--epochs 2 --steps_per_epoch 6 --batch_size 2", 2),
    "smoke, 10 tokens": ("--epochs 2 --steps_per_epoch 6 --batch_size 2 --max_new_tokens 10", 2),
    "the kit's rate": ("--epochs 2 --steps_per_epoch 6 --batch_size 2 --learning_rate 1e-5", 2),
    "defaults": ("", 5),
    "quick": ("--epochs 5 --steps_per_epoch 10 --batch_size 4 --max_new_tokens 15", 5),
    "full": ("--epochs 10 --steps_per_epoch 15 --batch_size 8 --max_new_tokens 20", 15),
}
"""Flags of `train.py`, and the kit's minutes (it promises none for the defaults: those of the quick run)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, help="a folder to keep runs in; those that it holds are not run again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = arguments.runs or Path(scratch)
        found = [measure(name, seed, home) for name in arguments.only for seed in arguments.seeds]
    rows = [[one["name"], one["seed"], span(one["before"]), span(one["after"]), kept(one), clock(one)] for one in found]
    columns = ["command", "seed", "held-out score before", "after", "learnt", "time (promised)"]
    flags = "\n".join(
        f"* {name}: `{' '.join(['python train.py', *COMMANDS[name][0].split()])}`" for name in arguments.only
    )
    body = (
        "Mean reward on 500 held-out prompts, with its 95 % interval. Learnt: weights moved in reinforcement learning, "
        "every update had a gradient, and the interval after training lies above the one before. The time is that of "
        f"the whole command, warm-up and evaluations included.\n\n{flags}\n\n{report.table(columns, rows)}"
    )
    report.write("kit", "The kit's commands", body, {"runs": found})
    return 0 if all(one["learnt"] and one["seconds"] <= 60 * one["minutes"] for one in found) else 1


def measure(name: str, seed: int, home: Path) -> dict[str, Any]:
    """Run one command, as a user would, and read what it left."""
    flags, minutes = COMMANDS[name]
    run = home / f"{re.sub('[^a-z0-9]+', '-', name)}-{seed}"
    kept_time = run.with_suffix(".seconds")
    if not kept_time.exists():
        began = time.perf_counter()
        words = [*flags.split(), "--seed", str(seed), f"run_dir={run}", "save_every=1000000"]
        command = [sys.executable, str(report.ROOT / "train.py"), *words]
        log = subprocess.run(command, text=True, capture_output=True, check=False, env={**os.environ})
        if log.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {log.returncode}\n{log.stdout}\n{log.stderr}")
        kept_time.write_text(str(time.perf_counter() - began))
    found, updates = summary(run), [one for one in metrics(run) if one.get("phase") == "rl"]
    before, after = found["before"], found["after"]
    gradients = all(one["grad_norm"] > 0 for one in updates)
    learnt = moved(run) and gradients and after["interval"][0] > before["interval"][1]
    return {
        "name": name,
        "seed": seed,
        "minutes": minutes,
        "seconds": float(kept_time.read_text()),
        "before": before,
        "after": after,
        "learnt": learnt,
        "steps": found["steps"],
        "findings": [one["said"] for one in found["findings"]],
    }


def moved(run: Path) -> bool:
    """Whether the policy is another than the one that reinforcement learning began with (the reference)."""
    old, new = (load_file(run / place / "model.safetensors") for place in ("reference", "checkpoints/latest/model"))
    return any(not torch.equal(old[name], new[name]) for name in old)


def span(score: dict[str, Any]) -> str:
    low, high = score["interval"]
    return f"{score['score']:.2f} [{low:.2f}, {high:.2f}]"


def kept(one: dict[str, Any]) -> str:
    return "yes" if one["learnt"] else "**no**"


def clock(one: dict[str, Any]) -> str:
    late = "" if one["seconds"] <= 60 * one["minutes"] else ", **late**"
    return f"{one['seconds'] / 60:.1f} min ({one['minutes']}{late})"


if __name__ == "__main__":
    sys.exit(main())
