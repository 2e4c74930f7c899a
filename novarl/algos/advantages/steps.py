"""Convert columns to steps: the tokens chosen by the policy in each row, without the gaps between its turns.

A row also contains prompts, padding and environment turns. Only chosen tokens are steps: the step after a chosen token
is the next chosen token, regardless of the columns in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from novarl.core.errors import NovaError


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of S rows, left-aligned: [S, T], 0 past the last of a row.

    `reward` r_t; `value` V(s_t); `next_value` V(s_{t+1}), the bootstrap at the last step; `present` marks steps and
    `last` the last of each row. `order` is the original column of each step, `dtype` that of the results.
    """

    reward: Tensor
    value: Tensor
    next_value: Tensor
    present: Tensor
    last: Tensor
    order: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor) -> Steps:
        """Rewards outside the mask are added to the preceding chosen column or else to the row's first."""
        _check(rewards, values, mask, bootstrap)
        dtype = torch.promote_types(rewards.dtype, values.dtype)
        work = torch.promote_types(dtype, torch.float32)
        order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
        count = mask.sum(1, keepdim=True)
        columns = torch.arange(mask.shape[1], device=mask.device)
        present, last = columns < count, columns == count - 1
        owner = (mask.cumsum(1) - 1).clamp(min=0)
        reward = torch.zeros_like(rewards, dtype=work).scatter_add(1, owner, rewards.detach().to(work))
        value = torch.where(present, values.detach().to(work).gather(1, order), 0.0)
        return cls(
            reward=torch.where(present, reward, 0.0),
            value=value,
            next_value=torch.where(last, bootstrap.detach().to(work)[:, None], ahead(value)),
            present=present,
            last=last,
            order=order,
            dtype=dtype,
        )

    def gather(self, column: Tensor) -> Tensor:
        """A column [S, T] by step, 0 past the last."""
        return torch.where(self.present, column.detach().gather(1, self.order), 0)

    def delta(self, gamma: float) -> Tensor:
        """r_t + gamma V(s_{t+1}) - V(s_t)."""
        return self.reward + gamma * self.next_value - self.value

    def log_ratio(self, logp: Tensor, behavior_logp: Tensor) -> Tensor:
        """log pi / mu of each step, 0 past the last; the difference is computed in the widest dtype."""
        wide = torch.promote_types(torch.promote_types(logp.dtype, behavior_logp.dtype), self.value.dtype)
        return (self.gather(logp).to(wide) - self.gather(behavior_logp).to(wide)).to(self.value.dtype)

    def ratio(self, logp: Tensor, behavior_logp: Tensor) -> Tensor:
        """pi / mu of each step, 0 past the last."""
        return torch.where(self.present, self.log_ratio(logp, behavior_logp).exp(), 0.0)

    def spread(self, advantage: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
        """Scatter both back to their original columns, 0 elsewhere."""

        def back(by_step: Tensor) -> Tensor:
            kept = torch.where(self.present, by_step, 0.0).to(self.dtype)
            return torch.zeros_like(kept).scatter(1, self.order, kept)

        return back(advantage), back(returns)


def ahead(by_step: Tensor) -> Tensor:
    """x_{t+1} for each t, 0 for the last column."""
    return torch.cat([by_step[:, 1:], torch.zeros_like(by_step[:, :1])], dim=1)


def accumulate(term: Tensor, weight: Tensor | float) -> Tensor:
    """x_t = term_t + weight_t x_{t+1} along each row [S, T], from x = 0 past the end."""
    weight = torch.as_tensor(weight, dtype=term.dtype, device=term.device).expand_as(term)
    total = term.new_zeros(term.shape[0])
    backwards = []
    for t in reversed(range(term.shape[1])):
        total = term[:, t] + weight[:, t] * total
        backwards.append(total)
    return torch.stack(backwards[::-1], dim=1) if backwards else term


def _check(rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise NovaError(f"mask is {mask.dtype}, not bool", where="advantages", fix="pass mask.bool()")
    if mask.ndim != 2 or rewards.shape != mask.shape or values.shape != mask.shape:
        shapes = f"rewards {list(rewards.shape)}, values {list(values.shape)}, mask {list(mask.shape)}"
        raise NovaError(f"{shapes} must all have the same shape [S, T]", where="advantages")
    if bootstrap.shape != mask.shape[:1]:
        raise NovaError(
            f"bootstrap has shape {list(bootstrap.shape)}, not [{mask.shape[0]}]",
            where="advantages",
            fix="pass one value per row, 0 if the row terminated",
        )
