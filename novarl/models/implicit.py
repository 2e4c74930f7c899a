"""A language model used as a reward model through its log-ratio to a reference (`algos.implicit_prm`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from novarl.algos.implicit_prm import token_rewards
from novarl.core.types import Batch
from novarl.models.forward import token_logprobs


@dataclass(frozen=True, slots=True)
class ImplicitModel:
    """r_t = beta (log model(y_t | x, y_<t) - log reference(y_t | x, y_<t)), whose sum is the reward of an answer."""

    model: nn.Module
    reference: nn.Module
    beta: float
    compute_dtype: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def token_rewards(self, batch: Batch) -> Tensor:
        """The rewards [N] of a batch's tokens, 0 outside its mask."""
        logp, reference = (
            token_logprobs(model, batch, wanted=batch.mask, compute_dtype=self.compute_dtype)[0]
            for model in (self.model, self.reference)
        )
        return token_rewards(logp, reference, batch.mask, beta=self.beta)

    def answer_rewards(self, batch: Batch) -> Tensor:
        """The rewards [S] of a batch's sequences."""
        found = self.token_rewards(batch).double()
        owner = torch.repeat_interleave(batch.cu_seqlens.diff())
        return found.new_zeros(batch.cu_seqlens.numel() - 1).index_add(0, owner, found)
