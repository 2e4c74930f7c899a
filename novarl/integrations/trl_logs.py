"""The three kinds of values in a log of TRL: of training, of an evaluation, and of the training as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

TOTALS = ("train_", "total_flos")
"""Beginnings of the names in the last log of a training, which describe the whole of it."""

RUNNING = {"epoch", "step", "num_tokens", "num_input_tokens_seen"}
"""Names that every log has; alone they are no line of metrics."""


class Log(NamedTuple):
    """One log, divided."""

    training: dict[str, Any]
    held_out: dict[str, Any]
    totals: dict[str, Any]


def divided(logs: Mapping[str, Any]) -> Log:
    """The parts of one log; `training` is empty if it has nothing but counters beside the other parts."""
    held_out = {name: value for name, value in logs.items() if name.startswith("eval_")}
    totals = {name: value for name, value in logs.items() if name.startswith(TOTALS)}
    training = {name: value for name, value in logs.items() if name not in held_out | totals and name != "step"}
    if (held_out or totals) and not set(training) - RUNNING:
        training = {}
    return Log(training, held_out, totals)


def kind_of(names: Iterable[str]) -> tuple[str, str]:
    """The trainer's kind in `names.TRL` and the run's, by the metrics that only this trainer logs. GRPO and RLOO log
    the same names."""
    known = set(names)
    marks = {
        "completions/mean_length": ("online", "rl"),
        "rewards/accuracies": ("dpo", "dpo"),
        "margin": ("reward", "rm"),
        "mean_token_accuracy": ("sft", "sft"),
        "rewards/chosen": ("kto", "dpo"),
    }
    return next((kinds for name, kinds in marks.items() if name in known), ("unknown", "sft"))
