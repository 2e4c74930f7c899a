"""A large vocabulary costs memory for a chunk of tokens, never for all of them.

Measured is what tensors hold at the worst moment of a whole policy update: every storage that an operator returns is
counted while it lives. That is exact and repeatable, where the resident size of the process is neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from novarl.algos.surrogates import ppo_clip
from novarl.core.types import Prompt, Rollout, Scored, Sequence
from novarl.data.pack import pack
from novarl.distributed.ranks import Ranks
from novarl.learn.credit import CreditRule
from novarl.learn.objective import Objective
from novarl.learn.optim import OptimSettings
from novarl.learn.policy import PolicyLearner
from novarl.learn.scorer import Scorer
from novarl.models.transformer import Decoder, DecoderConfig

VOCABULARY = 32_768
LENGTH = 128
LIMIT = 0.05
"""Largest growth of the peak, as a share of the size of the larger batch's logits."""


class Peak(TorchDispatchMode):
    """The most bytes that tensors have held at once since it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.bytes = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.is_mkldnn:  # its memory has no storage that can be seen
            held, name, size = tensor, id(tensor), tensor.numel() * tensor.element_size()
        else:
            held = tensor.untyped_storage()
            name, size = held._cdata, held.nbytes()
        if name not in self.known:
            self.known.add(name)
            self.alive += size
            self.bytes = max(self.bytes, self.alive)
            weakref.finalize(held, self._forget, name, size)

    def _forget(self, name: int, size: int) -> None:
        self.known.discard(name)
        self.alive -= size


def update(tokens: int, *, chunk: int) -> int:
    """Bytes at the worst moment of one update on `tokens` tokens in one micro-batch."""
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    model = Decoder(config)
    before = model.lm_head.weight.detach().clone()
    model.model.gradient_checkpointing = True
    scorer = Scorer(model, chunk=chunk)
    objective = Objective(surrogate=partial(ppo_clip, clip_low=0.2, clip_high=0.2), aggregation="token", constant=1.0)
    learner = PolicyLearner(
        model, scorer, objective=objective, optim=OptimSettings(lr=1e-3), ranks=Ranks(), budget=tokens
    )
    batch = pack([trajectory(index) for index in range(tokens // LENGTH)])
    assert batch.tokens.numel() == tokens and int(batch.mask.sum()) == tokens - tokens // LENGTH
    with Peak() as peak:
        scores = learner.score(batch)
        credit, _, _ = CreditRule("mean")(batch, scores, None)
        learner.update(batch, scores, credit)
    assert not torch.equal(before, model.lm_head.weight)
    return peak.bytes


def trajectory(index: int) -> Scored:
    """A trajectory of which every token but the first was chosen."""
    tokens = tuple((31 * index + 7 * place) % VOCABULARY for place in range(LENGTH))
    none = (0.0,) * LENGTH
    sequence = Sequence(tokens, (False, *(True,) * (LENGTH - 1)), none, none, (0,) * LENGTH)
    rollout = Rollout(Prompt(str(index), tokens[:1], ()), index // 2, index % 2, (sequence,), (), "")
    return Scored(rollout, {}, float(index % 2))


def growth(small: int, large: int, *, chunk: int) -> float:
    """How much more the larger batch needs at its worst moment, in units of its logits."""
    return (update(large, chunk=chunk) - update(small, chunk=chunk)) / (4 * large * VOCABULARY)


def test_peak_hardly_grows_with_the_batch() -> None:
    found = growth(2048, 16384, chunk=64)
    assert 0.0 < found < LIMIT, found


def test_a_chunk_of_all_tokens_is_caught() -> None:
    assert growth(256, 1024, chunk=1024) > 10 * LIMIT
    assert growth(256, 1024, chunk=64) < LIMIT, "the same sizes, chunked"


def test_the_measure_sees_what_a_forward_and_a_backward_pass_hold() -> None:
    weight = torch.randn(256, 256, requires_grad=True)
    with Peak() as peak:
        for _ in range(3):
            (weight.exp().exp() @ weight).sum().backward()
    size = 4 * 256 * 256
    assert 4 * size <= peak.bytes <= 8 * size
