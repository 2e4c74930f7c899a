"""Kill -9 at random instants, and at every operation of a save; each run is resumed to its end: `make test-kill`.

A run passes when its metrics (without the clocks) and every tensor of its last checkpoint are those of the run that was
never stopped, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report

RUN = [
    "rl",
    "task=sort",
    "reward=benchmarks/partial_reward.py:reward_fn",
    "model=tiny",
    "warmup=12",
    "steps=6",
    "prompts_per_rollout=4",
    "responses_per_prompt=4",
    "updates_per_rollout=2",
    "save_every=1",
    "eval_every=3",
    "eval.n=20",
    "kl.type=loss",
    "kl.coef=0.01",
    "log.rollouts_every=2",
    "log.console=false",
    "threads=1",
]
"""A warm-up and an RL phase with a reference model, two updates a step, checkpoints, evaluations and rollout logs."""


def command(run_dir: Path, *extra: str, dying: int | None = None) -> list[str]:
    module = ["-m", "novarl"] if dying is None else ["-m", "benchmarks.dying", str(dying)]
    return [sys.executable, *module, *RUN, f"run_dir={run_dir}", *extra]


def start(run_dir: Path, *extra: str, dying: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(run_dir, *extra, dying=dying), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(run_dir: Path) -> str:
    """Resume until the end; returns what was said on the way."""
    done = subprocess.run(command(run_dir, "resume=auto"), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"resuming {run_dir} ended with {done.returncode}:\n{done.stderr}")
    return done.stderr


def traces(run_dir: Path) -> tuple[list[Any], dict[str, str]]:
    """Metrics without the clocks, and the digest of every tensor file of the last checkpoint."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]
    last = (run_dir / "checkpoints" / "latest").resolve()
    files = {
        file.relative_to(last).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in last.rglob("*.safetensors")
    }
    files |= {
        f"rollouts/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (run_dir / "rollouts").iterdir()
    }
    return metrics, files


@dataclass(frozen=True)
class Trial:
    """One kill: at an instant (`after` seconds) or at an operation of a save (`operation`)."""

    name: str
    after: float | None = None
    operation: int | None = None

    def run(self, scratch: Path, reference: tuple[list[Any], dict[str, str]]) -> dict[str, Any]:
        run_dir = scratch / self.name
        process = start(run_dir, dying=self.operation)
        if self.after is not None:
            try:
                process.wait(self.after)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        killed = process.returncode == -9
        updates = (
            len((run_dir / "metrics.jsonl").read_text().splitlines()) if (run_dir / "metrics.jsonl").exists() else 0
        )
        said = finish(run_dir)
        equal = traces(run_dir) == reference
        shutil.rmtree(run_dir)
        found = {"trial": self.name, "killed": killed, "updates_seen": updates, "equal": equal, "after_s": self.after}
        return {**found, "operation": self.operation, "said": said.strip()[:200]}


def count_operations(scratch: Path) -> tuple[int, int]:
    """(operations of all saves, operations of one save) of an undisturbed run."""
    script = (
        "import sys; from benchmarks.dying import DyingDisk, checkpoint, cli; disk = DyingDisk(-2); "
        "checkpoint.DISK = disk; "
        "code = cli.main(sys.argv[1:]); print(disk.count + 1); sys.exit(code)"
    )
    words = [sys.executable, "-c", script, *RUN, f"run_dir={scratch / 'counted'}"]
    total = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])
    one = subprocess.run(
        [*words[:-1], f"run_dir={scratch / 'one'}", "steps=1", "warmup=0", "save_every=null"],
        capture_output=True,
        text=True,
        check=True,
    )
    return total, int(one.stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--instants", type=int, default=25, help="kills at random instants, a third of them inside a save"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        begin = time.perf_counter()
        process = start(scratch / "reference")
        if process.wait():
            raise SystemExit((process.stderr.read() if process.stderr else b"").decode())
        seconds = time.perf_counter() - begin
        reference = traces(scratch / "reference")
        if len(reference[0]) != 24 or not any(line.get("reward_std", 0) for line in reference[0]):
            raise SystemExit("the reference run is not worth comparing with: its rewards do not vary")
        other = start(scratch / "other-seed", "seed=1")
        other.wait()
        if traces(scratch / "other-seed") == reference:
            raise SystemExit("another seed gave the same run: this comparison cannot fail")
        total, one = count_operations(scratch)
        inside = max(5, arguments.instants // 3)
        trials = [Trial(f"save-{index}", operation=rng.randrange(total)) for index in range(inside)]
        trials += [
            Trial(f"instant-{index}", after=rng.uniform(0.3, 1.0) * seconds)
            for index in range(arguments.instants - inside)
        ]
        middle = total // 2 // one * one
        every = [Trial(f"operation-{index}", operation=middle + index) for index in range(one)]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            results = list(pool.map(lambda trial: trial.run(scratch, reference), trials + every))
    for result in results:
        print(result)
    random_ones, of_one_save = results[: len(trials)], results[len(trials) :]
    equal, fine = sum(r["equal"] for r in random_ones), sum(r["equal"] for r in of_one_save)
    print(f"{equal}/{len(random_ones)}")
    body = (
        f"A run of {len(reference[0])} updates (`novarl {' '.join(RUN)}`) is killed with SIGKILL and resumed with "
        "`resume=auto`; metrics without the clocks, rollout logs and every tensor of the last checkpoint are compared, "
        "bit for bit, with the run that was "
        "never stopped.\n\n"
        + report.table(
            ["kill", "trials", "killed before the end", "bit-identical"],
            [
                [
                    "at a random instant",
                    len(random_ones) - inside,
                    sum(r["killed"] for r in random_ones[inside:]),
                    sum(r["equal"] for r in random_ones[inside:]),
                ],
                [
                    "at a random write, fsync or rename of a save",
                    inside,
                    sum(r["killed"] for r in random_ones[:inside]),
                    sum(r["equal"] for r in random_ones[:inside]),
                ],
                [
                    "at each write, fsync and rename of one save",
                    len(of_one_save),
                    sum(r["killed"] for r in of_one_save),
                    fine,
                ],
            ],
        )
        + f"\n\n{equal}/{len(random_ones)} at random, {fine}/{len(of_one_save)} at each operation."
    )
    report.write("kill", "Kill and resume", body, {"results": results, "updates": len(reference[0])})
    return 0 if equal == len(random_ones) and fine == len(of_one_save) else 1


if __name__ == "__main__":
    raise SystemExit(main())
