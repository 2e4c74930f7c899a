"""Advantages of macro-steps: several tokens that count as one action, as a line of a proof or a turn of a game."""

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
    """GAE over macro-steps, the same advantage for every token of a step; shapes, dtypes and gaps as in `gae`.

        A_i = delta_i + gamma lam A_{i+1},   delta_i = r_i + gamma V(s_{i+1}) - V(s_i),   returns A_i + V(s_i)

    segment [S, T]: int ids, nondecreasing along a row; neighbours among the chosen tokens with equal ids form step i.
    Its value is that of its first token, the only one that is read; its reward is the sum of its tokens'; gamma
    discounts once per step. Ids outside the mask are not read, so a step goes on across a gap if its id does.

    With every token a step of its own this is `gae`. With gamma=1, lam=0 and values by fresh continuations it is
    VinePPO (https://arxiv.org/abs/2410.01679): A_i = r_i + V(s_{i+1}) - V(s_i).
    """
    tokens = Steps.of(rewards, values, mask, bootstrap)
    ids = tokens.gather(segment)
    # The first token of a row starts a step whatever its id.
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
