"""Compute the log-probability and entropy of each trained token of a batch with a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from novarl.algos.support import Support, support_of
from novarl.core.types import Batch
from novarl.distributed.ranks import Ranks
from novarl.distributed.shard import sharding_of
from novarl.learn.fitting import Splits, fitting
from novarl.learn.plan import piece, plan
from novarl.models.forward import Layout, hidden_states, predicted, read_scores, shares
from novarl.models.lora import without_adapters


@dataclass(frozen=True, slots=True)
class Scorer:
    """log pi(token_t | before) at `temperature`, [N], 0 outside the mask; logits are computed for `chunk` tokens at a
    time.

    If a batch records supports, pi is renormalised over them, for the policy as well as for a reference.
    """

    model: nn.Module
    temperature: float = 1.0
    chunk: int | None = None
    layout: Layout = "auto"
    compute_dtype: torch.dtype = torch.float32
    adapters: bool = True
    """False: disable adapters, for a reference without a second copy of the model."""
    splits: Splits = field(default_factory=Splits, compare=False)
    """Split counts of the passes here and in the learner."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def shares(self) -> bool:
        """Whether shared prefixes are computed once."""
        return shares(self.model, self.layout)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logp, entropy, _ = self.read(batch, self.hidden(batch))
        return logp, entropy

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states [M, D] after the last norm, at the positions that predict the M trained tokens."""
        with nullcontext() if self.adapters else without_adapters(self.model):
            return hidden_states(
                self.model,
                batch.tokens,
                batch.position_ids,
                batch.cu_seqlens,
                places=batch.prev[predicted(batch, batch.mask)],
                layout=self.layout,
                compute_dtype=self.compute_dtype,
            )

    def read(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probability, entropy, log-probability of the most likely token), each [N], from the batch's hidden
        states."""
        index = predicted(batch, batch.mask)
        support = None
        if batch.support is not None and batch.cu_support is not None:
            support = support_of(Support(batch.support, batch.cu_support), index)
        return read_scores(
            self.model, hidden, batch, index, temperature=self.temperature, chunk=self.chunk, support=support
        )

    @torch.no_grad()
    def logprobs(self, batch: Batch, ranks: Ranks, budget: int) -> Tensor:
        """Log-probabilities [N] of a whole batch's trained tokens, on the CPU, the same on every rank, computed in
        parallel in micro-batches of at most `budget` tokens."""
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        whole = torch.zeros(batch.tokens.numel(), dtype=dtype)

        def attempt(micro: Iterator[list[int]]) -> None:
            for trajectories in micro:
                part, index = piece(batch, trajectories, self.device)
                whole[index] = self(part)[0].to(whole)

        micro = plan(batch, ranks, budget, shares=self.shares)
        fitting(micro, attempt, self.splits, sharding=sharding_of(self.model))
        ranks.sum_(whole)
        return whole
