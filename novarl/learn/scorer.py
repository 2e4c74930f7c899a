"""A model as the learner sees it: a batch goes in, the log-probability and entropy of each trained token come out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from novarl.core.types import Batch
from novarl.distributed.ranks import Ranks
from novarl.learn.plan import piece, plan
from novarl.models.forward import Layout, token_logprobs


@dataclass(frozen=True, slots=True)
class Scorer:
    """log pi(token_t | before) at `temperature`, [N], 0 outside the mask; `chunk` tokens of logits exist at a time."""

    model: nn.Module
    temperature: float = 1.0
    chunk: int = 1024
    layout: Layout = "auto"
    compute_dtype: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            self.model,
            batch,
            wanted=batch.mask.nonzero().flatten(),
            temperature=self.temperature,
            chunk=self.chunk,
            layout=self.layout,
            compute_dtype=self.compute_dtype,
        )

    @torch.no_grad()
    def logprobs(self, batch: Batch, ranks: Ranks, budget: int) -> Tensor:
        """Log-probabilities [N] of a whole batch's trained tokens, on the CPU, the same on every rank; the ranks share
        the work, in micro-batches of at most `budget` tokens."""
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        whole = torch.zeros(batch.tokens.numel(), dtype=dtype)
        for trajectories in plan(batch, ranks, budget):
            part, index = piece(batch, trajectories, self.device)
            whole[index] = self(part)[0].to(whole)
        ranks.sum_(whole)
        return whole
