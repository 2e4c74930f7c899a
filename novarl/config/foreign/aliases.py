"""Names that other projects' users know, and what they are called here.

There is a table of data for each project. Its rows (`foreign`) are of three kinds:

    Alias    another name of one of our keys, or of several
    Fixed    a key that is accepted only at the value that says what NovaRL does anyway
    Hint     a key without a partner here, or with one of another meaning: the reason, and what to do instead

Here they are joined, with what several tables share: other names of values, and names that are read together. All of
it is shown in docs/names.md and tested row by row. `names.canonical` applies it. A row applies to the kinds of run that
it names, an alias to all that have the keys it leads to; our own names always win.
"""

from __future__ import annotations

from typing import Any

from novarl.config.foreign import openrlhf, others, rl2, trl, verl
from novarl.config.foreign.rows import Alias, Fixed, Hint, Row

ROWS: tuple[Row, ...] = (*others.ROWS, *rl2.ROWS, *trl.ROWS, *openrlhf.ROWS, *verl.ROWS)
ALIASES = tuple(row for row in ROWS if isinstance(row, Alias))
FIXED = tuple(row for row in ROWS if isinstance(row, Fixed))
HINTS = tuple(row for row in ROWS if isinstance(row, Hint))

VALUES: dict[str, dict[str, Any]] = {
    "adv.estimator": {
        "reinforce": "group",
        "loo": "leave_one_out",
        "rloo": "leave_one_out",
        "batch": "mean",
        "remax": "scst",
        "multistep": "n_step",
        "mc": "monte_carlo",
    },
    "loss.agg": {"token_mean": "token", "sequence_mean": "sequence"},
    "dtype": {"fp32": "float32", "float": "float32", "bf16": "bfloat16"},
    "resume": {"latest": "auto"},
    "kl.reference": {"copy": "start"},
    "adv.values": {"vine": "continuations"},
    "adaptive_kl.controller_type": {"adaptive": "dead_band"},
    "optim.schedule": {"constant_with_warmup": "constant"},
}
"""By our key: another library's name of a value, and ours. RL2's `reinforce` subtracts the prompt's mean reward."""

OBJECTIVE_NAMES = {"kl_penalty": "kl"}
DIRECTIONS = {"reward": "max", "kl": "min", "entropy": "max"}
"""RL2 lists objectives by name alone; these have a direction that everybody means. Its weights carry the sign of a sum,
so a negative one on an objective that is to be small says the same once more."""

KL_PLACES = {"reward_estimator": "reward", "loss_estimator": "loss"}
"""RL2 names the estimator by the place it is used in."""

RUN_NAMES = {
    "trainer.project": "project",
    "trainer.project_name": "project",
    "trainer.experiment_name": "experiment",
    "experiment_name": "experiment",
}
"""RL2's and verl's names of a run, by which part of its directory they are."""

READ_TOGETHER = {
    "reward_funcs": "TRL",
    "reward_weights": "TRL",
    "steps_per_epoch": "RLHF Systems Kit",
    "trainer.project": "RL2",
    "trainer.project_name": "verl",
    **{f"{part}kl.{name}": "RL2" for part in ("", "actor.") for name in KL_PLACES},
}
"""Names that mean something only together with others, and whose they are."""
