"""Multi-objective optimization with weights on the advantages of the single objectives.

Every objective is maximised (f_i = value, or -value if it is to be minimised) and divided by its running standard
deviation s_i. A scalarisation S of the expected objectives J_i then has the policy gradient

    grad S(J) = sum_i g_i grad J_i,  g_i = dS/dJ_i >= 0,        so  A = sum_i g_i A_i

With regret u_i = w_i (z_i - J_i), weight w_i and ideal z_i:

    method                    S                                     g_i
    "weighted_sum"            sum_i w_i J_i                         w_i
    "tchebycheff"             -max_i u_i                            w_i for the largest u_i, else 0
    "augmented_tchebycheff"   -max_i u_i - rho sum_i u_i            the same + rho w_i
    "smooth_tchebycheff"      -mu log sum_i exp(u_i / mu)           w_i softmax_i(u / mu)

A weighted sum reaches only the convex part of a front, the others all of it (Miettinen 1999; smooth: Lin et al. 2024,
https://arxiv.org/abs/2402.19078). Regret is signed: values above the ideal still count as better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from novarl.control.pareto import Direction, sign
from novarl.core.errors import NovaError

Method = Literal["weighted_sum", "tchebycheff", "augmented_tchebycheff", "smooth_tchebycheff"]
CONSTANT = 1e-9
"""A deviation below this fraction of the mean is considered rounding."""


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective. `ideal` is the best possible value, if known (1.0 for an accuracy), otherwise the best value so
    far."""

    name: str
    direction: Direction
    weight: float = 1.0
    ideal: float | None = None

    def __post_init__(self) -> None:
        where = f"objective {self.name!r}"
        if self.direction not in get_args(Direction):
            raise NovaError(f"invalid direction {self.direction!r}", where=where, fix="set direction to max or min")
        if not 0 <= self.weight < math.inf:
            other = "min" if self.direction == "max" else "max"
            fix = f"to reverse the direction, set direction {other} and weight {-self.weight}"
            raise NovaError(
                f"weight {self.weight} must be a finite number of at least 0; the direction is {self.direction}",
                where=where,
                fix=fix if self.weight < 0 else "set a finite weight",
            )
        if self.ideal is not None and not math.isfinite(self.ideal):
            raise NovaError(f"ideal must be a finite number, got {self.ideal}", where=where)


def maximised(values: Tensor, directions: Sequence[str]) -> Tensor:
    """values [..., K] with minimised objectives negated, so that higher is always better."""
    return values * values.new_tensor([sign(direction) for direction in directions])


def ideal_point(ideal: Tensor, estimates: Tensor) -> Tensor:
    """Update the best value of each objective [K]: z = max(z, J), all maximised."""
    return torch.maximum(ideal, estimates)


def weighted_sum(estimates: Tensor, ideal: Tensor, weights: Tensor) -> Tensor:
    """g_i = w_i [K], independent of the estimates."""
    return weights.to(estimates.dtype).clone()


def tchebycheff(estimates: Tensor, ideal: Tensor, weights: Tensor) -> Tensor:
    """g [K]: w_i for the objective with the largest regret, 0 elsewhere; ties share (a subgradient)."""
    regret = _regret(estimates, ideal, weights)
    worst = (regret == regret.max()).to(estimates.dtype)
    return weights.to(estimates.dtype) * worst / worst.sum()


def augmented_tchebycheff(estimates: Tensor, ideal: Tensor, weights: Tensor, *, rho: float) -> Tensor:
    """g [K]: `tchebycheff` + rho w_i, so that other objectives have a small weight (rho about 0.05)."""
    return tchebycheff(estimates, ideal, weights) + rho * weights.to(estimates.dtype)


def smooth_tchebycheff(estimates: Tensor, ideal: Tensor, weights: Tensor, *, mu: float) -> Tensor:
    """g_i = w_i softmax_i(w_i (z_i - J_i) / mu) [K] (https://arxiv.org/abs/2402.19078); mu > 0 in the unit of the
    estimates: for mu towards 0 it is `tchebycheff`, for large mu all objectives contribute in proportion to their
    weights."""
    share = (_regret(estimates, ideal, weights) / mu).softmax(-1)
    return weights.to(estimates.dtype) * share


def score(
    estimates: Tensor, ideal: Tensor, weights: Tensor, *, method: str, mu: float = 0.1, rho: float = 0.05
) -> Tensor:
    """S(J), 0-d, higher is better: the scalar whose gradient is given by `method`. ValueError if unknown."""
    if method == "weighted_sum":
        return (weights.to(estimates.dtype) * estimates).sum()
    regret = _regret(estimates, ideal, weights)
    match method:
        case "tchebycheff":
            return -regret.max()
        case "augmented_tchebycheff":
            return -regret.max() - rho * regret[weights > 0].sum()
        case "smooth_tchebycheff":
            return -mu * (regret / mu).logsumexp(-1)
    raise ValueError(f"unknown method {method!r}; one of {', '.join(get_args(Method))}")


def combine(advantages: Tensor, weights: Tensor) -> Tensor:
    """A = sum_i g_i A_i: advantages [K, R] or [K, N] of the single objectives, weights [K] -> [R] or [N]."""
    return torch.einsum("k...,k->...", advantages, weights.to(advantages.dtype))


def _regret(estimates: Tensor, ideal: Tensor, weights: Tensor) -> Tensor:
    """w_i (z_i - J_i) [K]; -inf for weight 0, so that observed objectives are never the worst."""
    return torch.where(weights > 0, weights.to(estimates.dtype) * (ideal - estimates), -math.inf)


class Objectives:
    """The objectives of a run, their statistics, and the resulting weights.

    `observe` takes the means and deviations of a step's trajectories and returns weights for the *raw* values,
    including direction and scale: `values @ weights` is the reward of a trajectory.

    * J_i, the estimate: a moving average of the means, J <- beta J + (1 - beta) mean, starting with the first.
    * z_i, the ideal: the best J_i so far, or the objective's `ideal` if that is better.
    * s_i, the deviation: the square root of the mean variance over all steps; an objective that is nearly always
      reached varies less and less, and a single failure would dominate. Constant objectives have no weight.
    """

    def __init__(
        self,
        objectives: Sequence[Objective],
        method: Method = "weighted_sum",
        *,
        mu: float = 0.1,
        rho: float = 0.05,
        beta: float = 0.9,
    ) -> None:
        names = [objective.name for objective in objectives]
        for name in names:
            if names.count(name) > 1:
                raise NovaError("is declared twice", where=f"objective {name!r}", fix="declare it once")
        if not any(objective.weight > 0 for objective in objectives):
            raise NovaError("at least one objective needs a weight above 0")
        if method not in get_args(Method):
            raise NovaError(f"unknown method {method!r}", fix=f"use one of {', '.join(get_args(Method))}")
        if not (mu > 0 and rho >= 0 and 0 <= beta < 1):
            raise NovaError(f"mu > 0, rho >= 0 and 0 <= beta < 1 are required, got mu={mu} rho={rho} beta={beta}")
        self.objectives, self.method = tuple(objectives), method
        self.mu, self.rho, self.beta = mu, rho, beta
        self._steps = 0
        self._mean: list[float] = []
        self._variance: list[float] = []
        self._best: list[float] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order of all other values."""
        return tuple(objective.name for objective in self.objectives)

    def observe(self, means: Sequence[float], deviations: Sequence[float]) -> list[float]:
        """Add a step's mean and deviation of each objective. Returns the weights d S / d mean_i [K] for raw values."""
        for name, mean, deviation in zip(self.names, means, deviations, strict=True):
            if not (math.isfinite(mean) and 0 <= deviation < math.inf):
                raise NovaError(f"invalid mean {mean} and deviation {deviation}", where=f"objective {name!r}")
        self._steps += 1
        before, spread = self._mean or means, self._variance or [0.0] * len(means)
        self._mean = [self.beta * old + (1 - self.beta) * new for old, new in zip(before, means, strict=True)]
        varied = [d if d > CONSTANT * abs(m) else 0.0 for m, d in zip(means, deviations, strict=True)]
        self._variance = [v + (d * d - v) / self._steps for v, d in zip(spread, varied, strict=True)]
        now = self._maximised(self._mean)
        self._best = ideal_point(torch.tensor(self._best, dtype=now.dtype) if self._best else now, now).tolist()
        return self.weights()

    def weights(self) -> list[float]:
        """The weights [K] for raw values after the last `observe`; 0 before it."""
        scale = self._per_deviation()
        if not (scale > 0).any():
            return [0.0] * len(self.objectives)
        state = self._state(scale)
        match self.method:
            case "weighted_sum":
                g = weighted_sum(*state)
            case "tchebycheff":
                g = tchebycheff(*state)
            case "augmented_tchebycheff":
                g = augmented_tchebycheff(*state, rho=self.rho)
            case "smooth_tchebycheff":
                g = smooth_tchebycheff(*state, mu=self.mu)
        return maximised(g * scale, self._directions).tolist()

    def score(self) -> float:
        """S(J) of the estimates in units of their deviations, higher is better; 0.0 before any objective has varied."""
        scale = self._per_deviation()
        if not (scale > 0).any():
            return 0.0
        return float(score(*self._state(scale), method=self.method, mu=self.mu, rho=self.rho))

    def state_dict(self) -> dict[str, Any]:
        """The observed statistics as plain numbers."""
        return {
            "names": list(self.names),
            "steps": self._steps,
            "mean": list(self._mean),
            "variance": list(self._variance),
            "best": list(self._best),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Raises NovaError if its objectives differ."""
        if tuple(state["names"]) != self.names:
            raise NovaError(
                f"the checkpoint has objectives {', '.join(state['names'])}, the run {', '.join(self.names)}",
                fix="resume with the original objectives",
            )
        self._steps = int(state["steps"])
        self._mean, self._variance, self._best = (list(state[name]) for name in ("mean", "variance", "best"))

    @property
    def _directions(self) -> list[Direction]:
        return [objective.direction for objective in self.objectives]

    def _maximised(self, values: Sequence[float]) -> Tensor:
        return maximised(torch.tensor(values, dtype=torch.float64), self._directions)

    def _per_deviation(self) -> Tensor:
        """1/s_i [K]; 0 for objectives that have not varied, and before the first `observe`."""
        variance = torch.tensor(self._variance or [0.0] * len(self.objectives), dtype=torch.float64)
        return torch.where(variance > 0, variance.clamp(min=1e-300).rsqrt(), 0.0)

    def _state(self, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(estimates, ideal, weights) [K], maximised and in units of the deviations."""
        best = torch.tensor(self._best, dtype=torch.float64)
        declared = self._maximised([math.nan if o.ideal is None else o.ideal for o in self.objectives])
        ideal = torch.where(declared.isnan(), best, ideal_point(best, declared))
        weights = torch.tensor([o.weight for o in self.objectives], dtype=torch.float64)
        return self._maximised(self._mean) * scale, ideal * scale, torch.where(scale > 0, weights, 0.0)
