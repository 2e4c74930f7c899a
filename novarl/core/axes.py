"""The names of an algorithm's parts, shared by the configuration and the table of algorithms."""

from __future__ import annotations

from typing import Literal

Estimator = Literal[
    "none",
    "constant",
    "mean",
    "ema",
    "scst",
    "group",
    "leave_one_out",
    "reinforce_pp",
    "opo",
    "gae",
    "vtrace",
    "retrace",
    "td_lambda",
    "n_step",
    "clipped_is",
    "monte_carlo",
    "prime",
]
SurrogateName = Literal["reinforce", "ppo_clip", "dual_clip", "gspo", "cispo", "gpg", "sapo"]
ValueSource = Literal["critic", "continuations"]
KLType = Literal["loss", "reward", "advantage"]
KLEstimator = Literal["k1", "k2", "k3"]
OwnFunction = str
"""A user-defined function in place of a built-in one: `file.py:name`."""
AggregationName = Literal["token", "sequence", "constant"]
Need = Literal["group", "greedy", "reference", "old_logp", "values", "process"]
