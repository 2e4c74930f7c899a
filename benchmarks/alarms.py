"""How often alerts are right: each fault is put into real runs, with healthy runs as controls: `make bench-alarms`.

Runs are those of a tiny model that sorts letters, from one checkpoint after warm-up. Thresholds were tuned on the seeds
below 100; only seeds from 100 on are reported, unless --tune is given. Results are kept after each run, and runs that
are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import comb, exp, factorial, log
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.alarm_faults import FAULTS, PLUMBING, TRAINING, Fault, injected
from novarl.core.errors import NovaError
from novarl.observe.sinks.jsonl import read_lines

FAMILIES = ("grpo", "rloo", "ppo", "reinforce")
HEALTHY = "healthy"
HEALTHY_STEPS = 30
REPORTED, TUNED = 100, 0
"""The first seed of the runs that are reported, and of those that thresholds were tuned on."""
LENGTHS = (4, 5, 5, 5)
"""Letters to sort: prompts of two lengths, so that padding occurs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algo", nargs="+", default=list(FAMILIES), help="algorithms")
    parser.add_argument("--fault", nargs="+", default=[HEALTHY, *FAULTS], choices=[HEALTHY, *FAULTS])
    parser.add_argument("--runs", type=int, default=20, help="runs of each fault and algorithm")
    parser.add_argument("--healthy", type=int, default=50, help="healthy runs of each algorithm")
    parser.add_argument("--quick", action="store_true", help="1 run of each fault and 2 healthy ones")
    parser.add_argument("--tune", action="store_true", help="seeds 0 to 9, printed and not written to docs/")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are there already")
    arguments = parser.parse_args()
    runs, healthy = (1, 2) if arguments.quick else (arguments.runs, arguments.healthy)
    if arguments.tune:
        runs, healthy = min(runs, 10), min(healthy, 10)
    first = TUNED if arguments.tune else REPORTED
    wanted = [
        (fault, algo, first + number)
        for number in range(max(runs, healthy))
        for fault in arguments.fault
        for algo in arguments.algo
        if number < (healthy if fault == HEALTHY else runs) and _occurs(fault, algo)
    ]
    kept = _Results(None if arguments.tune else report.RESULTS / "alarms.json", fresh=arguments.fresh)
    missing = [key for key in wanted if key not in kept.runs]
    if missing:
        _run_all(missing, kept, at_once=arguments.at_once)
    found = list(kept.runs.values())
    body = page(found)
    if arguments.tune:
        print(body)
    else:
        report.write("alarms", "How often alerts are right", body, {"runs": list(kept.runs.values())})
    return 0


def _run_all(missing: Sequence[tuple[str, str, int]], kept: _Results, *, at_once: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        start = _start(Path(scratch))
        with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as pool:
            for done in as_completed([pool.submit(run, start, Path(scratch), *key) for key in missing]):
                kept.add(done.result())


class _Results:
    """The runs so far, written after each."""

    def __init__(self, file: Path | None, *, fresh: bool) -> None:
        self.file = file
        self.runs: dict[tuple[str, str, int], dict[str, Any]] = {}
        if file is not None and file.is_file() and not fresh:
            for one in json.loads(file.read_text())["runs"]:
                self.runs[one["fault"], one["algo"], one["seed"]] = one

    def add(self, one: dict[str, Any]) -> None:
        self.runs[one["fault"], one["algo"], one["seed"]] = one
        print(json.dumps(one), flush=True)
        if self.file is not None:
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps({"runs": list(self.runs.values())}, indent=1) + "\n")
            part.replace(self.file)


def _occurs(name: str, algo: str) -> bool:
    families = FAULTS[name].families if name in FAULTS else None
    return families is None or algo in families


def _start(scratch: Path) -> Path:
    """The tiny model after its warm-up."""
    from benchmarks.every_task import train

    folder = scratch / "start"
    train("task=sort", "steps=1", "prompts_per_rollout=1", "responses_per_prompt=2", f"run_dir={folder}", "eval.n=0")
    (warm,) = (folder / "checkpoints").glob("warmup-*")
    return warm / "model"


def rows(count: int = 400) -> list[dict[str, str]]:
    """Letters to sort, as rows of data."""
    draw = random.Random(0)
    letters = ["".join(draw.sample("abcdefghij", LENGTHS[place % len(LENGTHS)])) for place in range(count)]
    return [{"prompt": f"sort: {each}", "answer": "".join(sorted(each))} for each in letters]


def is_sorted(messages: Sequence[Mapping[str, Any]], answer: Any) -> float:
    """1 for the sorted letters, else 0."""
    return float(str(messages[-1]["content"]).strip() == answer)


def run(start: Path, scratch: Path, name: str, algo: str, seed: int) -> dict[str, Any]:
    """One run; returns its alerts, the step of each, and how many updates and seconds it took."""
    import novarl

    fault = FAULTS.get(name)
    folder, began = scratch / f"{name}-{algo}-{seed}", time.perf_counter()
    options: dict[str, Any] = dict(fault.settings) if fault is not None else {}
    if fault is not None and fault.engine is not None:
        build, onset = fault.engine, fault.onset
        options["engine"] = lambda policy: build(policy, onset)
    error = None
    with injected(fault, seed):
        trainer = novarl.RL(
            model=str(start),
            prompts=rows(),
            reward=is_sorted,
            algo=algo,
            seed=seed,
            steps=fault.steps if fault is not None else HEALTHY_STEPS,
            prompts_per_rollout=8,
            responses_per_prompt=4,
            rollout={"max_tokens": 8},
            optim={"lr": 5e-4},
            eval={"n": 0},
            save_every=None,
            threads=1,
            log={"console": False, "tensorboard": False},
            run_dir=str(folder),
            **options,
        )
        try:
            trainer.run()
        except NovaError as refused:
            error = str(refused)
        trainer.close()
    alerts = [
        [int(event["step"]), event["alert"]]
        for event in read_lines(folder / "events.jsonl")
        if event["kind"] == "alert" and "alert" in event
    ]
    steps = {row["step"] for row in read_lines(folder / "metrics.jsonl") if row["phase"] == "rl"}
    shutil.rmtree(folder)
    before = fault.onset - 1 if fault is not None else len(steps)
    return {
        "fault": name,
        "algo": algo,
        "seed": seed,
        "steps": len(steps),
        "healthy_steps": min(len(steps), before),
        "alerts": alerts,
        "error": error,
        "seconds": round(time.perf_counter() - began, 2),
    }


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """The tables of the page."""
    faulty = [one for one in found if one["fault"] != HEALTHY]
    parts = []
    for kind, faults in (("Training faults: detected", TRAINING), ("Plumbing faults: named correctly", PLUMBING)):
        lines = [line for fault in faults for line in _rates(fault, faulty)]
        columns = ["fault", "alert", "algorithm", "runs", "right", "95 % lower bound", "median delay in steps"]
        parts.append(f"## {kind}\n\n{report.table(columns, lines)}")
    parts.append(f"## False alarms\n\n{_false_alarms(found)}")
    parts.append(f"## Confusion\n\nThe first alert of each run after the fault began.\n\n{_confusion(faulty)}")
    return "\n\n".join((_introduction(found), *parts))


def _introduction(found: Sequence[Mapping[str, Any]]) -> str:
    seconds = sum(one["seconds"] for one in found)
    least = min(Counter((one["fault"], one["algo"]) for one in found if one["fault"] != HEALTHY).values(), default=0)
    healthy = sum(one["fault"] == HEALTHY for one in found)
    text = (
        f"{len(found)} runs of a tiny model that sorts letters ({seconds:,.0f} seconds of runs), {healthy} of them "
        f"healthy, at least {least} for each fault and algorithm. Bounds are exact (Clopper and Pearson). A fault is "
        "put in from outside at a known step; a training fault is detected if its alert is raised in the run, a "
        "plumbing fault is named correctly if the first plumbing alert is its own. Thresholds were tuned on other "
        "seeds."
    )
    text += " Reward hacking has no alert of its own, and no rate here."
    if least < 20 or healthy < 200:
        text += (
            "\n\n**This is a small sample.** The targets are 95 % right, with 20 runs of each fault and algorithm, and "
            "at most one false alarm in 1,000 steps over 200 healthy runs. "
            f"{least} and {healthy} runs cannot show that; the bounds below say what they show."
        )
    return text


def _rates(fault: Fault, runs: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    lines: list[list[object]] = []
    for algo in dict.fromkeys(one["algo"] for one in runs):
        mine = [one for one in runs if one["fault"] == fault.name and one["algo"] == algo]
        if not mine:
            continue
        right = [delay for one in mine if (delay := _delay(fault, one)) is not None]
        low, _ = clopper_pearson(len(right), len(mine))
        late = f"{median(right):g}" if right else "-"
        lines.append([fault.name, fault.expected, algo, len(mine), len(right), low, late])
    return lines


def _delay(fault: Fault, one: Mapping[str, Any]) -> int | None:
    """Steps from the fault to its alert; None if it was not found, or a plumbing fault was given another name."""
    after = [(step, name) for step, name in one["alerts"] if step >= fault.onset]
    if fault.kind == "plumbing":
        after = [pair for pair in after if pair[1] in _EXPECTED_PLUMBING][:1]
    return next((step - fault.onset for step, name in after if name == fault.expected), None)


_EXPECTED_PLUMBING = {fault.expected for fault in PLUMBING}


def _false_alarms(found: Sequence[Mapping[str, Any]]) -> str:
    """Alerts in healthy runs, per 1,000 steps, with the exact interval of a Poisson rate."""
    healthy = [one for one in found if one["fault"] == HEALTHY]
    lines: list[list[object]] = []
    for algo in [*dict.fromkeys(one["algo"] for one in healthy), "all"]:
        mine = [one for one in healthy if algo in (one["algo"], "all")]
        steps, names = sum(one["steps"] for one in mine), [name for one in mine for _, name in one["alerts"]]
        low, high = poisson(len(names))
        which = ", ".join(f"{name} {count}" for name, count in Counter(names).most_common()) or "none"
        rate = 1000.0 / max(1, steps)
        lines.append(
            [
                algo,
                len(mine),
                steps,
                len(names),
                f"{len(names) * rate:.2f}",
                f"{low * rate:.2f} to {high * rate:.2f}",
                which,
            ]
        )
    return report.table(["algorithm", "runs", "steps", "alarms", "per 1,000", "95 % interval", "which"], lines)


def _confusion(runs: Sequence[Mapping[str, Any]]) -> str:
    first: dict[str, Counter[str]] = {}
    for one in runs:
        onset = FAULTS[one["fault"]].onset
        name = next((name for step, name in one["alerts"] if step >= onset), "none")
        first.setdefault(one["fault"], Counter())[name] += 1
    names = list(dict.fromkeys(name for counts in first.values() for name in counts))
    lines: list[list[object]] = [[fault, *(counts[name] or "" for name in names)] for fault, counts in first.items()]
    return report.table(["fault", *names], lines)


def clopper_pearson(right: int, of: int, *, level: float = 0.95) -> tuple[float, float]:
    """The exact interval of a proportion (Clopper and Pearson, 1934)."""
    tail = (1.0 - level) / 2.0

    def at_least(p: float, k: int) -> float:
        return sum(comb(of, n) * p**n * (1.0 - p) ** (of - n) for n in range(k, of + 1))

    low = 0.0 if right == 0 else _solved(lambda p: at_least(p, right), tail)
    high = 1.0 if right == of else _solved(lambda p: at_least(p, right + 1), 1.0 - tail)
    return low, high


def poisson(count: int, *, level: float = 0.95) -> tuple[float, float]:
    """The exact interval of the mean of a Poisson count (Garwood, 1936)."""
    tail = (1.0 - level) / 2.0

    def at_least(mean: float, k: int) -> float:
        return 1.0 - exp(-mean) * sum(mean**n / factorial(n) for n in range(k))

    most = 10.0 * count + 20.0
    low = 0.0 if count == 0 else most * _solved(lambda p: at_least(most * p, count), tail)
    return low, -log(tail) if count == 0 else most * _solved(lambda p: at_least(most * p, count + 1), 1.0 - tail)


def _solved(rising: Any, value: float) -> float:
    """The p in [0, 1] at which a rising function reaches a value."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return (low + high) / 2.0


if __name__ == "__main__":
    raise SystemExit(main())
