"""The policy that KL is measured to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from novarl.core.errors import NovaError
from novarl.learn.scorer import Scorer
from novarl.models.forward import head
from novarl.models.load import load, save
from novarl.models.reference import freeze, frozen_copy

if TYPE_CHECKING:
    from novarl.build.rl import Online


def open_reference(run: Online) -> Scorer:
    """`kl.reference` as a model that is never trained.

    What starts as the policy did when reinforcement learning began is kept in the run directory for whoever resumes; a
    moving average of the policy also lies, as it has moved since, in the learner's state. Under LoRA the start is the
    policy without its adapters.
    """
    name = run.config.kl.reference
    if name == "tie":
        return run.scorer
    if name not in ("start", "ema"):
        return replace(run.scorer, model=_other(run, name))
    if run.config.lora.rank > 0:
        return replace(run.scorer, adapters=False)
    folder = run.session.rundir.path / "reference"
    if run.state is not None and run.state["phase"] == "rl":
        model = freeze(load(str(folder), dtype=run.config.dtype, device=run.scorer.device, attn=run.config.attn).model)
    else:
        model = frozen_copy(run.policy.model)
        if run.ranks.rank == 0:
            save(run.policy, folder)
        run.ranks.wait()
    return replace(run.scorer, model=model)


def _other(run: Online, name: str) -> nn.Module:
    """A model of its own, which must speak the policy's tokens."""
    other = load(name, dtype=run.config.dtype, device=run.scorer.device, attn=run.config.attn)
    mine, theirs = run.policy, other
    same_size = head(mine.model)[0].size(0) == head(theirs.model)[0].size(0)
    probe = "Tokens, 1 2 3:\n¿así?"
    if not same_size or list(mine.tokenizer.encode(probe)) != list(theirs.tokenizer.encode(probe)):
        raise NovaError(
            "this model has other tokens than the policy, so their log-probabilities cannot be compared",
            where=f"kl.reference={name}",
            fix="name a model with the policy's tokenizer",
        )
    return freeze(theirs.model)
