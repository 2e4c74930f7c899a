"""`novarl compare`: is one side better than another, by how much, and what would settle it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from novarl.core.errors import wrapped
from novarl.observe.compare import Plan, compare, holm, plan, sampling_variance
from novarl.observe.evaluations import Paired, Side, differing
from novarl.observe.terminal.tables import labelled, table

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SIGNIFICANT = 0.05
SCORED_BY = ("task", "task_options", "reward", "best_of")
"""Settings that decide what a score means."""


def facts(sides: Sequence[Side], found: Paired, *, effect: float | None, use_samples: bool) -> dict[str, Any]:
    """Everything that `novarl compare` prints. Each further side is compared with the first."""
    results = []
    for place in range(1, len(sides)):
        part = sampling_variance([found.samples[0], found.samples[place]]) if use_samples else math.nan
        results.append(compare(found.scores[0], found.scores[place], of_samples=part))
    adjusted = holm([result.p for result in results])
    return {
        "prompts": len(found.prompts),
        "dropped": found.dropped,
        "samples_per_prompt": len(found.samples[0][0][0]) if use_samples else 1,
        "sides": [
            _side(letter, side, found.scores[place])
            for place, (letter, side) in enumerate(zip(LETTERS, sides, strict=False))
        ],
        "comparisons": [
            {
                "sides": ["A", LETTERS[place + 1]],
                "changed": _changes(sides[0], sides[place + 1]),
                **_plain(asdict(result)),
                "p_adjusted": p,
                "plan": _planned(plan(result, effect)),
            }
            for place, (result, p) in enumerate(zip(results, adjusted, strict=True))
        ],
    }


def _side(letter: str, side: Side, scores: Sequence[Sequence[float]]) -> dict[str, Any]:
    return {
        "side": letter,
        "runs": [str(run.path) for run in side.runs],
        "seeds": [run.manifest.get("seed") for run in side.runs],
        "step": side.step,
        "score": fmean(fmean(run) for run in scores),
    }


def _changes(first: Side, second: Side) -> dict[str, list[Any]]:
    keys = differing(first.settings, second.settings)
    return {key: [first.settings.get(key), second.settings.get(key)] for key in keys}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """NaN is null in JSON."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _planned(found: Plan | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def render_comparison(found: Mapping[str, Any]) -> str:
    """The page."""
    prompts, many = found["prompts"], found["samples_per_prompt"] > 1
    what = f"mean of {found['samples_per_prompt']} samples" if many else "greedy answers"
    lines = wrapped(f"{prompts} held-out prompts, {what}, paired by prompt.")
    if found["dropped"]:
        some = "1 prompt has" if found["dropped"] == 1 else f"{found['dropped']} prompts have"
        lines += wrapped(f"Left out: {some} no score in some run.")
    rows = [(side["side"], f"{side['score']:.3f}", str(len(side["runs"])), _names(side)) for side in found["sides"]]
    lines += ["", *table(("side", "score", "runs", "directories"), rows, right=(1, 2))]
    for one in found["comparisons"]:
        lines += ["", *_comparison(one, prompts, adjusted=len(found["comparisons"]) > 1, many=many)]
    return "\n".join(lines) + "\n"


def _names(side: Mapping[str, Any]) -> str:
    names = [Path(run).name or run for run in side["runs"]]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return shown + (f", step {side['step']}" if side["step"] is not None else "")


def _comparison(one: Mapping[str, Any], prompts: int, *, adjusted: bool, many: bool) -> list[str]:
    first, second = one["sides"]
    p = one["p_adjusted"]
    between = (
        f"95% interval [{one['low']:+.3f}, {one['high']:+.3f}]"
        if one["low"] is not None
        else "no interval: every prompt shows the same difference"
    )
    chance = f"p = {p:.3g}" + (" (adjusted for the number of comparisons, Holm)" if adjusted else "")
    pairs = [
        (f"{second} - {first}", f"{one['mean']:+.3f}, {between}, {chance}"),
        ("prompts", f"{second} better on {one['better']}, worse on {one['worse']}, equal on {one['equal']}"),
        ("verdict", _verdict(one, p)),
    ]
    pairs += [("to settle", text) for text in _advice(one, prompts, many=many)]
    changes = [f"{key} {_word(a)} -> {_word(b)}" for key, (a, b) in one["changed"].items()]
    if changes:
        shown = ", ".join(changes[:6]) + (f" and {len(changes) - 6} more" if len(changes) > 6 else "")
        pairs.insert(0, ("settings", shown))
    if scored := [key for key in one["changed"] if key.partition(".")[0] in SCORED_BY]:
        pairs.append(("note", f"the sides are scored in different ways ({scored[0]}), so scores may not be comparable"))
    if not one["seeds_known"]:
        pairs.append(("note", "one run per side: the interval covers the choice of prompts, not of the seed"))
    elif min(one["seeds"]) == 1:
        pairs.append(("note", "the side with one run is given the variance between seeds of the other"))
    return labelled(pairs)


def _word(value: Any) -> str:
    return "null" if value is None else str(value)


def _verdict(one: Mapping[str, Any], p: float) -> str:
    first, second = one["sides"]
    if p >= SIGNIFICANT:
        return "no clear difference" if one["mean"] else "no difference"
    return f"{second if one['mean'] > 0 else first} is better by {abs(one['mean']):.3f}"


def _advice(one: Mapping[str, Any], prompts: int, *, many: bool) -> list[str]:
    """What would detect the difference with 80 % power."""
    found = one["plan"]
    if found is None:
        return []
    ways = []
    if found["prompts"] is not None:
        more = found["prompts"] - prompts
        enough = "these prompts suffice" if more <= 0 else f"{found['prompts']:,} prompts ({more:,} more)"
        ways.append(enough)
    if found["seeds"] is not None:
        ways.append(f"{found['seeds']:,} runs per side" if found["seeds"] > one["seeds"][0] else "these runs suffice")
    if many and found["samples"] is not None and found["samples"] > 1:
        ways.append(f"{math.ceil(found['samples'])} times as many samples per prompt")
    start = f"80% power for a difference of {found['effect']:.3f}: "
    if found["both"] is not None:
        ways.append(f"{found['both'][0]:,} prompts and {found['both'][1]:,} runs per side together")
    if not ways:
        return [f"{start}more prompts alone do not suffice; give both sides the same number of runs"]
    return [start + ", or ".join(ways)]
