"""The built-in rewards by name, and the user's own by `file.py:name`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from novarl.core.errors import NovaError
from novarl.models.trust import Trust
from novarl.rewards import user_file
from novarl.rewards.endings import preference
from novarl.rewards.length import length
from novarl.rewards.lexical import lexical
from novarl.rewards.math import MathReward
from novarl.rewards.per_rollout import environment
from novarl.rewards.sentiment import sentiment
from novarl.rewards.services import Progress
from novarl.rewards.shaping import overlong, repetition
from novarl.rewards.signature import lacking_fix
from novarl.rewards.verdict import Scorer

REWARDS: dict[str, Callable[..., Scorer]] = {
    "lexical": lexical,
    "sentiment": lambda: sentiment,
    "preference": lambda: preference,
    "length": length,
    "math": MathReward,
    "get_soft_overlong_punishment": overlong,
    "get_repetition_penalty_reward": repetition,
    "environment": lambda: environment,
}
"""Each built-in reward, made from its options."""


_OF_TRL = {
    "accuracy_reward": "reward=math compares mathematical answers too; or ",
    "reasoning_accuracy_reward": "",
    "think_format_reward": "",
    "get_cosine_scaled_reward": "",
}
"""Rewards of TRL's that are not built in, and what is said before the usual advice."""


def find_reward(
    source: str,
    *,
    time_limit: float = user_file.TIME_LIMIT,
    workers: int | None = 1,
    columns: Collection[str] | None = None,
    memory: int | None = None,
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    trust: Trust | None = None,
) -> Scorer:
    """The reward `source` names: a built-in one with its `options`; a function of a file, `file.py:name`
    (`user_file.load`, in so many `workers` of `memory` bytes, with the data's `columns` where they are known, and the
    run's `progress`); or a trained reward model, `model:FOLDER`, on `device` and with `trust` in its files. NovaError
    for anything else."""
    if source == "math":
        if columns is not None and "answer" not in columns:
            what = "needs a reference answer, but the data has no column 'answer'"
            raise NovaError(what, where="reward=math", fix=lacking_fix("answer", columns))
        return MathReward(time_limit=time_limit, **(options or {}))
    if source in REWARDS:
        return REWARDS[source](**(options or {}))
    if source.startswith("model:"):
        from novarl.rewards.model import load_model_reward  # only here, because it needs torch

        return load_model_reward(source.removeprefix("model:"), device=device, trust=trust or Trust())
    if ".py" in source:
        return user_file.load(
            source, time_limit=time_limit, workers=workers, columns=columns, memory=memory, progress=progress
        )
    if source in _OF_TRL:
        name, line = source, f"from trl.rewards import {source}"
        if source.startswith("get_"):
            name, line = "NAME", f"{line}; NAME = {source}(...)"
        fix = f"{_OF_TRL[source]}set reward=file.py:{name}, in a file with `{line}`"
        raise NovaError(f"TRL's reward {source} is not built in", where="reward", fix=fix)
    near = difflib.get_close_matches(source, REWARDS, n=1, cutoff=0.5)
    fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(REWARDS)}, file.py:name, or model:FOLDER"
    raise NovaError(f"unknown reward {source!r}", where="reward", fix=fix)
