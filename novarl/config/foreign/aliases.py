"""What the tables of other libraries' names do not hold: other names of values, and names that are read together."""

from __future__ import annotations

from typing import Any

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
"""By key: another library's name of a value, and ours. RL2's `reinforce` subtracts the mean reward of the prompt."""

OBJECTIVE_NAMES = {"kl_penalty": "kl"}
DIRECTIONS = {"reward": "max", "kl": "min", "entropy": "max"}
"""RL2 lists objectives by name; these have an obvious direction. Its weights are those of a sum, so a negative weight
of an objective that is minimized states its direction again."""

KL_PLACES = {"reward_estimator": "reward", "loss_estimator": "loss"}
"""RL2 names the estimator by where it is used."""

RUN_NAMES = {
    "trainer.project": "project",
    "trainer.project_name": "project",
    "trainer.experiment_name": "experiment",
    "experiment_name": "experiment",
}
"""RL2's and verl's names of a run, and the part of its directory that each sets."""

ADAPTERS = {"lora.rank": 16, "lora.alpha": 32.0}
"""What TRL's `use_peft=true` sets unless it is given."""

READ_TOGETHER = {
    "reward_funcs": "TRL",
    "reward_weights": "TRL",
    "use_peft": "TRL",
    "steps_per_epoch": "RLHF Systems Kit",
    "trainer.project": "RL2",
    "trainer.project_name": "verl",
    **{f"{part}kl.{name}": "RL2" for part in ("", "actor.") for name in KL_PLACES},
}
"""Names that are read together with others, and their library."""
