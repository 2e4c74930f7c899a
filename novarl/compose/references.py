"""The reference policy of KL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from novarl.compose.parts import Parts
from novarl.compose.trust import trust_of
from novarl.core.errors import NovaError
from novarl.learn.scorer import Scorer
from novarl.models.forward import vocabulary_of
from novarl.models.implicit import ImplicitModel
from novarl.models.load import Policy, load, save
from novarl.models.reference import freeze, frozen_copy
from novarl.rewards.model import load_implicit

if TYPE_CHECKING:
    from novarl.config.tree import RLConfig


def open_reference(parts: Parts, named: nn.Module | None, folder: Path, *, resumed: bool) -> Scorer:
    """`kl.reference` as a frozen model; `named` is the model that it names, if any. A copy of the initial policy is
    kept in `folder` for a resume. With LoRA, the initial policy is the policy without its adapters."""
    config, scorer = parts.config, parts.scorer
    if config.kl.reference == "tie":
        return scorer
    if named is not None:
        return replace(scorer, model=named)
    if config.lora.rank > 0:
        return replace(scorer, adapters=False)
    if resumed:
        trust = trust_of(config, str(folder))
        kept = load(str(folder), dtype=config.dtype, device=scorer.device, attn=config.attn, trust=trust)
        model = freeze(kept.model)
    else:
        model = frozen_copy(parts.policy.model)
        if parts.ranks.rank == 0:
            save(parts.policy, folder)
        parts.ranks.wait()
    return replace(scorer, model=model)


def named_reference(config: RLConfig, policy: Policy, longest: int, device: torch.device) -> nn.Module | None:
    """The separate model named by `kl.reference`, or None. It must have the policy's tokenizer and accept the `longest`
    sequence that may be sampled; otherwise a NovaError is raised before anything is written or trained."""
    name = config.kl.reference
    if name in ("start", "ema", "tie"):
        return None
    where = f"kl.reference={name}"
    try:
        theirs = load(name, dtype=config.dtype, device=device, attn=config.attn, trust=trust_of(config))
    except NovaError as error:
        raise NovaError(error.what, where=where, fix="use start, ema, tie, a model directory or a hub id") from error
    _speaks_as(policy, theirs, longest, where)
    return freeze(theirs.model)


def named_process_model(config: RLConfig, policy: Policy, longest: int, device: torch.device) -> ImplicitModel | None:
    """The model named by `prime.model`, with its reference, or None. NovaError as in `named_reference`."""
    name = config.prime.model
    if name is None:
        return None
    where = f"prime.model={name}"
    found = load_implicit(name, where, device=str(device), trust=trust_of(config))
    _speaks_as(policy, found.policy, longest, where)
    assert isinstance(found.model, ImplicitModel)
    return found.model


def _speaks_as(policy: Policy, theirs: Policy, longest: int, where: str) -> None:
    """Refuse a model whose log-probabilities are not comparable with the policy's."""
    same_size = vocabulary_of(policy.model) == vocabulary_of(theirs.model)
    probe = "Tokens, 1 2 3:\n¿así?"
    if not same_size or list(policy.tokenizer.encode(probe)) != list(theirs.tokenizer.encode(probe)):
        raise NovaError(
            "this model and the policy have different tokenizers, so their log-probabilities are not comparable",
            where=where,
            fix="use a model with the policy's tokenizer",
        )
    if theirs.context < longest:
        raise NovaError(
            f"this model's context is {theirs.limit}, but a prompt with its answer may have {longest} tokens",
            where=where,
            fix="use a model with a longer context, or lower rollout.max_tokens or max_length",
        )
