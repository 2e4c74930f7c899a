"""Advantages of macro-steps: several tokens that form one action, such as a line of a proof or a turn of a game."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from novarl.algos.advantages.steps import Steps, accumulate, ahead


def segment_gae(
    *,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    segment: Tensor,
    bootstrap: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """GAE over macro-steps: all tokens of a step have the same advantage. Shapes, dtypes and gaps as in `gae`.

        A_i = delta_i + gamma lam A_{i+1},   delta_i = r_i + gamma V(s_{i+1}) - V(s_i),   returns A_i + V(s_i)

    segment [S, T]: int ids, nondecreasing along a row; consecutive chosen tokens with equal ids form step i. Its value
    is that of its first token (others are not read), its reward the sum over its tokens; gamma discounts once per step.
    Ids outside the mask are not read, so a step continues across a gap if its id does.

    If every token is its own step, this is `gae`. With gamma=1, lam=0 and values by fresh continuations it is VinePPO
    (https://arxiv.org/abs/2410.01679): A_i = r_i + V(s_{i+1}) - V(s_i).
    """
    tokens = Steps.of(rewards, values, mask, bootstrap)
    ids = tokens.gather(segment)
    # The first token of a row always starts a step.
    starts = tokens.present & torch.cat([torch.ones_like(mask[:, :1]), ids[:, 1:] != ids[:, :-1]], dim=1)
    owner = (starts.cumsum(1) - 1).clamp(min=0)
    count = starts.sum(1, keepdim=True)
    columns = torch.arange(mask.shape[1], device=mask.device)
    present, last = columns < count, columns == count - 1
    zeros = torch.zeros_like(tokens.value)
    value = zeros.scatter_add(1, owner, torch.where(starts, tokens.value, 0.0))
    after = torch.where(tokens.last, tokens.next_value, 0.0).sum(1, keepdim=True)
    macro = dataclasses.replace(
        tokens,
        reward=zeros.scatter_add(1, owner, tokens.reward),
        value=value,
        next_value=torch.where(last, after, ahead(value)),
        present=present,
        last=last,
    )
    advantage = accumulate(macro.delta(gamma), gamma * lam)
    return tokens.spread(advantage.gather(1, owner), (advantage + value).gather(1, owner))
