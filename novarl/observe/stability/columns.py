"""The tokens of a step as arrays: from the rollout log of a run, or from rows that any program wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from novarl.core.config_files import read as read_settings
from novarl.core.errors import NovaError
from novarl.observe.rollouts import RolloutRow, read_arrays
from novarl.observe.stability.faults import Setting

MOST = 16384
"""Tokens of a step that are looked at: the first sequences that hold so many, prompts included."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Columns:
    """The sampled tokens of a step, [N] each, in order; `row` says which sequence a token belongs to.

    behavior   log-probability under the sampler; learner: under the learner before the step's first update
    entropy    of the learner's distribution; reference: log-probability under the reference; empty if unknown
    context    equal numbers where the token and everything before it are equal
    place      the token's position in its answer, from 0
    prompt     the length of each sequence's prompt, [S]; tokens, or characters if only the text is known
    """

    row: NDArray[np.int64]
    place: NDArray[np.int64]
    behavior: Floats
    learner: Floats
    entropy: Floats
    reference: Floats
    context: NDArray[np.int64]
    prompt: NDArray[np.int64]


def step_columns(stem: Path) -> Columns | None:
    """The tokens of a step that is completely logged as `stem`.safetensors and `stem`.update.safetensors; None while it
    is not, or if neither the sampler's nor the learner's log-probabilities are there."""
    batch_file, update_file = Path(f"{stem}.safetensors"), Path(f"{stem}.update.safetensors")
    if not (batch_file.is_file() and update_file.is_file()):
        return None
    batch = read_arrays(batch_file) | read_arrays(update_file)
    bounds = batch["cu_seqlens"].astype(np.int64)
    kept = max(1, int(np.searchsorted(bounds, MOST, side="right")) - 1)
    end = int(bounds[kept])
    mask = batch["mask"][:end].astype(bool)
    if not mask.any() or "logp" not in batch:
        return None
    lengths = np.diff(bounds[: kept + 1])
    row = np.repeat(np.arange(kept), lengths)
    prompt = np.array([_first(mask[bounds[s] : bounds[s + 1]]) for s in range(kept)], dtype=np.int64)

    def column(name: str) -> Floats:
        return batch[name][:end][mask].astype(np.float64) if name in batch else np.empty(0)

    old = column("old_logp")
    return Columns(
        row=row[mask],
        place=(batch["position_ids"][:end] - prompt[row])[mask].astype(np.int64),
        behavior=column("behavior_logp"),
        learner=old if old.size else column("logp"),
        entropy=column("entropy"),
        reference=column("ref_logp"),
        context=_contexts(batch["tokens"][:end], bounds[: kept + 1])[mask],
        prompt=prompt,
    )


def row_columns(rows: Sequence[RolloutRow]) -> Columns | None:
    """The tokens of the answers of a step that have log-probabilities of both sides; None if no answer has."""
    held = [row for row in rows if row.behavior_logp and row.old_logp and len(row.behavior_logp) == len(row.old_logp)]
    if not held:
        return None

    def column(name: str) -> Floats:
        parts = [getattr(row, name) for row in held]
        whole = all(len(part) == len(row.old_logp) for part, row in zip(parts, held, strict=True))
        return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts]) if whole else np.empty(0)

    known: dict[Any, int] = {}
    contexts: list[int] = []
    for row in held:
        marks: Sequence[Any] = row.tokens or tuple(range(len(row.old_logp)))
        same: tuple[Any, ...] = (row.prompt_id, row.prompt) if row.tokens else (id(row),)
        for mark in marks:
            same = (hash(same), mark)
            contexts.append(known.setdefault(same, len(known)))
    lengths = [len(row.old_logp) for row in held]
    return Columns(
        row=np.repeat(np.arange(len(held)), lengths),
        place=np.concatenate([np.arange(length) for length in lengths]),
        behavior=column("behavior_logp"),
        learner=column("old_logp"),
        entropy=column("entropy"),
        reference=column("ref_logp"),
        context=np.asarray(contexts, dtype=np.int64),
        prompt=np.array([len(row.prompt) for row in held], dtype=np.int64),
    )


def newest_setting(folder: Path) -> Setting:
    """What the run in `folder` says about its sampling; unknown values where it has no config.yaml."""
    try:
        config: Mapping[str, Any] = read_settings(folder / "config.yaml")[0]
    except (OSError, NovaError):
        return Setting()
    dtype, lora, rollout = config.get("dtype"), config.get("lora"), config.get("rollout")
    return Setting(
        dtype=dtype if isinstance(dtype, str) else None,
        adapters=isinstance(lora, Mapping) and bool(lora.get("rank")),
        lag=int(rollout.get("staleness") or 0) if isinstance(rollout, Mapping) else 0,
    )


def _first(mask: NDArray[np.bool_]) -> int:
    return int(mask.argmax()) if mask.any() else mask.size


def _contexts(tokens: NDArray[Any], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each token, equal where the token and all before it in its sequence are equal."""
    known: dict[tuple[int, int], int] = {}
    found = np.empty(tokens.size, dtype=np.int64)
    for begin, end in pairwise(bounds.tolist()):
        node = -1
        for place, token in enumerate(tokens[begin:end].tolist(), start=begin):
            node = known.setdefault((node, token), len(known))
            found[place] = node
    return found
