"""Kill -9 at random instants and at every operation of a save; each run is resumed to its end: `make test-kill`.

A run passes when every file that it leaves is that of the run which was never stopped (`benchmarks.left`).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.left import differences, left

ON_SORT = [
    *("rl", "task=sort", "reward=benchmarks/partial_reward.py:reward_fn", "model=tiny", "warmup=12", "steps=6"),
    *("prompts_per_rollout=4", "responses_per_prompt=4", "save_every=1", "eval_every=3", "eval.n=20"),
    *("log.rollouts_every=2", "log.console=false", "threads=1"),
]
SHORT = ["model=tiny", "steps=3", "save_every=1", "eval_every=1", "eval.n=4", "log.console=false", "threads=1"]
MAIN = "KL and a warm-up"
FAMILIES: dict[str, list[str]] = {
    MAIN: [*ON_SORT, "updates_per_rollout=2", "kl.type=loss", "kl.coef=0.01"],
    "a critic": [*ON_SORT, "algo=ppo", "steps=3"],
    "continuations": [*ON_SORT, "algo=vineppo", "steps=2"],
    "process rewards": [*ON_SORT, "algo=prime", "steps=3"],
    "sampled ahead": [*ON_SORT, "rollout.staleness=1", "steps=4"],
    "truncated, ahead": [*ON_SORT, "rollout.top_p=0.9", "rollout.staleness=1", "steps=3"],
    "adapters": [*ON_SORT, "lora.rank=4", "steps=3"],
    "supervised": ["sft", "data={pairs}", "prompt_key=prompt", "completion_key=chosen", "batch_size=4", *SHORT],
    "preferences": ["dpo", "data={pairs}", "batch_size=4", *SHORT],
    "labels": ["dpo", "loss=kto", "data={pairs}", "batch_size=4", *SHORT],
    "a reward model": ["rm", "data={pairs}", "batch_size=4", *SHORT],
}
"""Every kind of state that a checkpoint holds. In MAIN, two updates a step, evaluations, a reference, rollout logs."""


def write_pairs(file: Path) -> None:
    rows = [{"prompt": f"{i} and {i}?", "chosen": f"It is {2 * i}.", "rejected": f"{i}, I think."} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class Family:
    """A run: its words, what it leaves when nothing stops it, and the operations by which it saves."""

    words: list[str]
    left: Mapping[str, Any]
    operations: Sequence[str]
    seconds: float


def command(words: Sequence[str], run_dir: Path, *extra: str, dying: int | Path | None = None) -> list[str]:
    module = ["-m", "novarl"] if dying is None else ["-m", "benchmarks.dying", str(dying)]
    return [sys.executable, *module, *words, f"run_dir={run_dir}", *extra]


def finish(words: Sequence[str], run_dir: Path, *extra: str, dying: Path | None = None) -> str:
    """Run to the end; returns what was said on the way."""
    done = subprocess.run(command(words, run_dir, *extra, dying=dying), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{run_dir} ended with {done.returncode}:\n{done.stderr}")
    return done.stderr


def undisturbed(name: str, words: list[str], scratch: Path) -> Family:
    run_dir, names = scratch / "undisturbed" / name.replace(" ", "-"), scratch / f"{name.replace(' ', '-')}.json"
    begin = time.perf_counter()
    finish(words, run_dir, dying=names)
    return Family(words, left(run_dir), json.loads(names.read_text()), time.perf_counter() - begin)


@dataclass(frozen=True)
class Trial:
    """One kill of a run of `family`: at an instant (`after` seconds), or at an operation (`operation`).

    Where `again` is given, the first resume is killed too, at that operation of its own.
    """

    kind: str
    family: str
    number: int
    after: float | None = None
    operation: int | None = None
    again: int | None = None

    def run(self, family: Family, scratch: Path) -> dict[str, Any]:
        run_dir = scratch / f"{self.kind}-{self.family}-{self.number}".replace(" ", "-")
        killed = self._killed(family.words, run_dir, dying=self.operation, after=self.after)
        if self.again is not None:
            killed = self._killed(family.words, run_dir, "resume=auto", dying=self.again) and killed
        try:
            said, wrong = finish(family.words, run_dir, "resume=auto"), differences(left(run_dir), family.left)
        except SystemExit as ended:
            said, wrong = str(ended), ["it could not be resumed"]
        shutil.rmtree(run_dir, ignore_errors=True)
        at = self.again if self.again is not None else self.operation
        return {
            **{"kind": self.kind, "family": self.family, "operation": at, "after_s": self.after, "killed": killed},
            **{"equal": not wrong, "different": wrong[:8], "said": said.strip()[:300]},
        }

    @staticmethod
    def _killed(
        words: Sequence[str], run_dir: Path, *extra: str, dying: int | None = None, after: float | None = None
    ) -> bool:
        process = subprocess.Popen(
            command(words, run_dir, *extra, dying=dying), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            process.kill()
        return process.wait() == -9


def saves(operations: Sequence[str]) -> list[range]:
    """The operations of each save: from after the link of the one before to that of its own; the first begins with the
    run's first write, the last ends with the run's last one."""
    ends = [index + 1 for index, name in enumerate(operations) if name == "rename latest"]
    return [range(a, b) for a, b in zip([0, *ends[:-1]], [*ends[:-1], len(operations)], strict=True)]


def planned(families: Mapping[str, Family], instants: int, sparse: int, rng: random.Random) -> list[Trial]:
    """All kills. Of the families beside MAIN every `sparse`-th operation of the last save, and each rename of it."""
    main = families.get(MAIN)
    trials: list[Trial] = []

    def add(kind: str, family: str, **when: Any) -> None:
        trials.append(Trial(kind, family, len(trials), **when))

    for name, family in families.items():
        windows, renames = saves(family.operations), [i for i, op in enumerate(family.operations) if "rename" in op]
        if family is main:
            for _ in range(instants):
                add("a random instant", name, after=rng.uniform(0.3, 1.0) * family.seconds)
            for index in windows[0]:
                add("the first save", name, operation=index)
            for index in windows[-1]:
                add("the last save", name, operation=index)
            for index in (i for i in renames if family.operations[i] == "rename best"):
                begin = next(window[0] for window in reversed(windows) if window[-1] < index)
                for operation in range(begin, index + 3):  # that save, its links, and what it drops
                    add("the save of the best", name, operation=operation)
            for index in range(25):
                add("a resume's own writes", name, operation=windows[len(windows) // 2][len(windows) // 2], again=index)
        else:
            add("a random instant", name, after=rng.uniform(0.3, 1.0) * family.seconds)
            for index in sorted({*windows[-1][::sparse], *(i for i in renames if i in windows[-1])}):
                add("the last save", name, operation=index)
    return trials


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instants", type=int, default=25, help="kills at random instants of the main run")
    parser.add_argument("--sparse", type=int, default=6, help="of the other runs, every so-manyth operation is one")
    parser.add_argument(
        "--only", nargs="*", default=list(FAMILIES), help="families of runs; the results are not written"
    )
    parser.add_argument("--most", type=int, help="so many trials, drawn at random; the results are not written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_pairs(scratch / "pairs.jsonl")
        families = {
            family: undisturbed(
                family, [word.replace("{pairs}", str(scratch / "pairs.jsonl")) for word in words], scratch
            )
            for family, words in FAMILIES.items()
            if family in arguments.only
        }
        check_that_it_can_fail(families, scratch)
        trials = planned(families, arguments.instants, arguments.sparse, rng)
        if arguments.most:
            trials = rng.sample(trials, min(arguments.most, len(trials)))
        run: Callable[[Trial], dict[str, Any]] = lambda trial: trial.run(families[trial.family], scratch)  # noqa: E731
        with ThreadPoolExecutor(arguments.jobs) as pool:
            results = []
            for result in pool.map(run, trials):
                results.append(result)
                print(result, flush=True)
    equal = sum(result["equal"] for result in results)
    print(f"{equal}/{len(results)}")
    if len(families) == len(FAMILIES) and not arguments.most:
        write(results)
    return 0 if equal == len(results) else 1


def check_that_it_can_fail(families: Mapping[str, Family], scratch: Path) -> None:
    """Another seed must give another run."""
    for name, family in families.items():
        run_dir = scratch / "other-seed" / name.replace(" ", "-")
        finish(family.words, run_dir, "seed=1")
        if "metrics.jsonl" not in differences(left(run_dir), family.left):
            raise SystemExit(f"{name}: another seed gave the same metrics: this comparison cannot fail")


def write(results: Sequence[Mapping[str, Any]]) -> None:
    """docs/results/kill.md and its JSON."""
    cells: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        cells[result["kind"], result["family"]].append(result)
    rows = [
        [kind, family, len(found), sum(one["killed"] for one in found), sum(one["equal"] for one in found)]
        for (kind, family), found in cells.items()
    ]
    equal = sum(result["equal"] for result in results)
    body = (
        f"Runs of {len(FAMILIES)} kinds (the first: `novarl {' '.join(FAMILIES[MAIN])}`) are killed with SIGKILL and "
        "resumed with `resume=auto`; every file of the run directory is compared with that of the run that was never "
        "stopped, but for clocks, memory, timestamps, paths and host names.\n\n"
        + report.table(["kill at", "run", "trials", "killed before the end", "identical"], rows)
        + f"\n\n{equal}/{len(results)} identical."
    )
    report.write("kill", "Kill and resume", body, {"results": list(results)})


if __name__ == "__main__":
    raise SystemExit(main())
