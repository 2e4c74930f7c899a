"""The page of `make bench`: a summary of all goals, and a section for each workload."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks import report
from benchmarks.floors import LASTING
from benchmarks.workloads import WORKLOADS

BINS = 8
"""Bars of a histogram of lengths."""
PARTS = {"seconds": "in all", "step_seconds": "a step", "first_step": "to the end of the first step"}
DIGITS = {"memory_mb": 0, "tokens_per_second": 0, "tokens": 0, "steps": 0}
ABOUT = """\
Each side runs in a process of its own, alternating with the others, with the same weights file, prompts, data order and
hyper-parameters. W4's learning rates are in its settings; the newest page gives each side its best. The first step is
excluded, except in W9.

* **Value**: a ratio of medians over the rounds, with a 95 % bootstrap interval over rounds.
* **Speed**: TRL's seconds per step over ours; in W5, where steps hold different numbers of tokens, seconds per token;
  in W7 our tokens per second over the other side's. Times are wall-clock times between steps, measured from outside.
* **Memory**: the peak resident memory of the process and its children, above what they held when training began; on a
  GPU the peak memory of tensors.
* **TRL** runs without gradient checkpointing, with sdpa, and in float32 unless a side says bf16. "best" is the fastest
  of the listed ways to split its batch; ways more than a quarter slower in the first round are dropped.
* Both sides run in virtualenvs with what users install. `MKL_CBWR`, which bit-exact results need, is set for us only.
* Answers are random text of a fixed length distribution, shown for each side.
* The rates for the floors are measured before and after each round, and the better of the two counts.

The date, the commit and the settings of each side are below each section ("commit None": a working tree without one).
Sections from older commits may differ in the details above."""


def load(page: str) -> dict[str, Any]:
    """The records that docs/results/<page>.json holds now."""
    path = report.RESULTS / f"{page}.json"
    found: dict[str, Any] = json.loads(path.read_text())["workloads"] if path.exists() else {}
    return found


def write(page: str, records: Mapping[str, Any]) -> None:
    rows = [
        [name, goal, *_goal(goal, found)[1:]]
        for name, record in records.items()
        for goal, found in record["goals"].items()
    ]
    summary = report.table(["workload", "what", "value", "95 % interval", "goal", "met"], rows)
    sections = [section(name, record) for name, record in records.items()]
    report.write(page, "Speed and memory beside TRL", "\n\n".join([ABOUT, summary, *sections]), {"workloads": records})


def section(name: str, record: Mapping[str, Any]) -> str:
    """A workload's part of the page."""
    workload = WORKLOADS[name]
    middle = {side: medians(runs) for side, runs in record["runs"].items() if runs}
    shown = [number for number in workload.shown if any(number in numbers for numbers in middle.values())]
    best = record["best"]
    rows = [
        [side + (" (best)" if side == best else ""), len(record["runs"][side])]
        + [number_said(number, numbers.get(number)) for number in shown]
        for side, numbers in middle.items()
    ]
    parts = [
        f"## {name}: {workload.title}",
        report.table(
            ["goal", "value", "95 % interval", "goal", "met"], [_goal(*pair) for pair in record["goals"].items()]
        ),
        report.table(["side", "rounds", *(number.replace("_", " ") for number in shown)], rows),
    ]
    if workload.notes:
        parts.append(workload.notes)
    if record["again"]:
        parts.append(f"Measured again by itself, not in turn with the others: {', '.join(record['again'])}.")
    if record["floors"]:
        parts.append(_floors_said(record, middle))
    if lengths := _histograms(record["runs"]):
        parts.append(lengths)
    settings = {side: runs[-1]["about"] for side, runs in record["runs"].items() if runs and runs[-1]["about"]}
    on = "" if record["machine"]["device"] == "cpu" else f"{record['machine']['device']}, "
    judged = {side for goal in workload.goals for side in (goal.side, goal.over)} | {"ours", best}
    fenced = "\n".join(f"{side}: {json.dumps(about)}" for side, about in settings.items() if side in judged or not best)
    parts.append(
        f"{record['date']}, {on}{record['machine']['processor']}, {record['threads']} threads, commit "
        f"{record['machine']['commit']}.\n\n```\n{fenced}\n```"
    )
    return "\n\n".join(parts)


def _goal(name: str, found: Mapping[str, Any]) -> list[object]:
    said = f"{found['direction']} {found['goal']:.3g}"
    if _out_of_reach(found):
        said += f" ({found['at_floor']:.3g} at the floor)"
    if found["met"] is None:
        return [name, "-", "-", said, f"cannot be shown here: {found['why']}"]
    low, high = found["interval"]
    between = f"{low:.3g} to {high:.3g}" if high > low else "-"  # of one round
    met = "yes" if found["met"] else "**NO**"
    # A goal that is missed by a hair should not look like one that is met.
    value, goal = found["value"], found["goal"]
    digits = next((digits for digits in (3, 4, 5) if f"{value:.{digits}g}" != f"{goal:.{digits}g}"), 3)
    return [name, f"**{value:.{digits}g}**", between, said, met]


def _out_of_reach(found: Mapping[str, Any]) -> bool:
    """Whether not even the floor would meet the goal."""
    if "at_floor" not in found:
        return False
    above: bool = found["at_floor"] > found["goal"]
    return above if found["direction"] == "at most" else not above


def _floors_said(record: Mapping[str, Any], middle: Mapping[str, Mapping[str, float]]) -> str:
    rates, sides = record["rates"], []
    for side, floor in record["floors"].items():
        parts = [
            f"{least:.2f} s {PARTS.get(part, f'in {part}')} (we reach {middle[side][f'{part}_share']:.0%})"
            for part, least in floor.items()
        ]
        sides.append(("" if side == "ours" else f"{side}: ") + ", ".join(parts))
    importing = ""
    if "torch" in rates:  # pages of earlier code have no such measure
        importing = f" Importing torch takes {rates['torch']:.2f} s, with transformers {rates['transformers']:.2f} s."
    lasting = ""
    if rates.get("lasting_fp32"):
        lasting = f" ({rates['lasting_fp32']:.0f} if they go on for {LASTING:.0f} s)"
    peak = ""
    if rates.get("peak_bf16", 0.0) > rates["train_bf16"]:
        peak = f" Its maker states a peak of {rates['peak_bf16']:.0f} GFLOP/s in bf16."
    return (
        f"Floor on this machine, by the formulas in `benchmarks/floors.py`: {'; '.join(sides)}, with a median of "
        f"{rates['train_fp32']:.0f} GFLOP/s in training's products{lasting}, {rates['decode_fp32']:.0f} in decoding's "
        f"(in bf16 {rates['train_bf16']:.0f} and {rates['decode_bf16']:.0f}) and {rates['bandwidth']:.0f} GB/s."
        f"{peak}{importing}"
    )


def _histograms(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """How long the answers were on each side: the share in each of BINS equal bins, and the mean."""
    lengths = {side: [length for run in past for length in run["lengths"]] for side, past in runs.items()}
    lengths = {side: found for side, found in lengths.items() if found}
    if not lengths:
        return ""
    width = -(-max(map(max, lengths.values())) // BINS)
    names = [f"{width * index + 1} to {width * (index + 1)}" for index in range(BINS)]
    rows = []
    for side, found in lengths.items():
        counts = [sum((length - 1) // width == index for length in found) for index in range(BINS)]
        rows.append([side, len(found), *(f"{count / len(found):.0%}" for count in counts), f"{fmean(found):.1f}"])
    return "Lengths of answers, in tokens:\n\n" + report.table(["side", "answers", *names, "mean"], rows)


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    numbers = runs[-1]["numbers"] if runs else {}
    return {name: median(run["numbers"][name] for run in runs if name in run["numbers"]) for name in numbers}


def number_said(name: str, value: float | None) -> str:
    return "-" if value is None else f"{value:.{DIGITS.get(name, 3)}f}"
