"""Several objectives at once, as weights on the advantages that each would have alone.

Every objective is turned so that more is better (f_i = value, or -value where it is to be minimised) and divided by its
running deviation s_i. A scalarisation S of the expected objectives J_i then has the policy gradient

    grad S(J) = sum_i g_i grad J_i,  g_i = dS/dJ_i >= 0,        so  A = sum_i g_i A_i

Regret u_i = w_i (z_i - J_i), w_i the weight and z_i the ideal:

    method                    S                                     g_i
    "weighted_sum"            sum_i w_i J_i                         w_i
    "tchebycheff"             -max_i u_i                            w_i where u_i is the largest, 0 elsewhere
    "augmented_tchebycheff"   -max_i u_i - rho sum_i u_i            that, + rho w_i
    "smooth_tchebycheff"      -mu log sum_i exp(u_i / mu)           w_i softmax_i(u / mu)

A weighted sum can only reach the convex part of a front; the others reach all of it (Miettinen 1999; smooth: Lin et al.
2024, https://arxiv.org/abs/2402.19078). Regret has no absolute value: what lies above its ideal still counts as better,
so that improving any one objective never lowers S, whatever the estimates. An objective of weight 0 is only observed.
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
"""A deviation below this share of the mean is rounding: the objective does not vary."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One thing to be good at. `ideal` is the best value it can have, as measured, where that is known (1.0 of an
    accuracy, 0.0 of a KL): without it, the best that the run has seen so far."""

    name: str
    direction: Direction
    weight: float = 1.0
    ideal: float | None = None

    def __post_init__(self) -> None:
        where = f"objective {self.name!r}"
        if self.direction not in get_args(Direction):
            raise NovaError(f"has no direction, got {self.direction!r}", where=where, fix="set direction to max or min")
        if not 0 <= self.weight < math.inf:
            other = "min" if self.direction == "max" else "max"
            fix = f"say direction {other} and weight {-self.weight} if less weight meant the other end"
            raise NovaError(
                f"weight {self.weight} contradicts direction {self.direction}: a weight says how much, not which way",
                where=where,
                fix=fix if self.weight < 0 else "set a finite weight",
            )
        if self.ideal is not None and not math.isfinite(self.ideal):
            raise NovaError(f"the ideal must be a finite number, got {self.ideal}", where=where)


def maximised(values: Tensor, directions: Sequence[str]) -> Tensor:
    """values [..., K] with the objectives to be minimised turned round, so that more is better everywhere."""
    return values * values.new_tensor([sign(direction) for direction in directions])


def ideal_point(ideal: Tensor, estimates: Tensor) -> Tensor:
    """The best of each objective [K] so far, and now: z = max(z, J), all maximised."""
    return torch.maximum(ideal, estimates)


def weighted_sum(estimates: Tensor, ideal: Tensor, weights: Tensor) -> Tensor:
    """g_i = w_i [K], whatever the estimates."""
    return weights.to(estimates.dtype).clone()


def tchebycheff(estimates: Tensor, ideal: Tensor, weights: Tensor) -> Tensor:
    """g [K]: w_i of the objective with the largest regret, 0 elsewhere; equals share (a subgradient)."""
    regret = _regret(estimates, ideal, weights)
    worst = (regret == regret.max()).to(estimates.dtype)
    return weights.to(estimates.dtype) * worst / worst.sum()


def augmented_tchebycheff(estimates: Tensor, ideal: Tensor, weights: Tensor, *, rho: float) -> Tensor:
    """g [K]: `tchebycheff` + rho w_i, so that what is not the worst still counts a little (rho about 0.05)."""
    return tchebycheff(estimates, ideal, weights) + rho * weights.to(estimates.dtype)


def smooth_tchebycheff(estimates: Tensor, ideal: Tensor, weights: Tensor, *, mu: float) -> Tensor:
    """g_i = w_i softmax_i(w_i (z_i - J_i) / mu) [K] (https://arxiv.org/abs/2402.19078).

    estimates, ideal, weights [K], maximised; mu > 0 in the unit of the estimates: towards 0 it is `tchebycheff`, and
    where it is large all objectives share in proportion to their weights.
    """
    share = (_regret(estimates, ideal, weights) / mu).softmax(-1)
    return weights.to(estimates.dtype) * share


def score(
    estimates: Tensor, ideal: Tensor, weights: Tensor, *, method: str, mu: float = 0.1, rho: float = 0.05
) -> Tensor:
    """S(J), 0-d, higher is better: the scalar whose gradient the weights of `method` are. ValueError for another."""
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
    """A = sum_i g_i A_i: advantages [K, R] or [K, N], each of one objective alone, weights [K] -> [R] or [N]."""
    return torch.einsum("k...,k->...", advantages, weights.to(advantages.dtype))


def _regret(estimates: Tensor, ideal: Tensor, weights: Tensor) -> Tensor:
    """w_i (z_i - J_i) [K]; -inf where the weight is 0, so that what is only observed is never the worst."""
    return torch.where(weights > 0, weights.to(estimates.dtype) * (ideal - estimates), -math.inf)


class Objectives:
    """The objectives of a run, what is known of each, and the weights that follow.

    `observe` takes the means and deviations of a step's trajectories and returns the weights for the *raw* values:
    direction and scale are in them, so that `values @ weights` is the reward of a trajectory, and an advantage that is
    linear in the reward is the sum of theirs.

    * J_i, the estimate: a moving average of the means, J <- beta J + (1 - beta) mean, beginning at the first.
    * z_i, the ideal: the best that J_i has been, or the objective's own `ideal` where that is better still.
    * s_i, the deviation: the root of the mean variance over all steps so far, not of the latest ones: an objective that
      is nearly always won varies less and less, and dividing by that alone would let a single loss outweigh the rest.
      Units therefore do not matter, and `mu` is in deviations. What has never varied has no weight yet.

    A fixed sum in the rewards' own units needs none of this: it is what the weights of rewards are for.
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
                raise NovaError(
                    "is declared twice", where=f"objective {name!r}", fix="name it once, with one direction"
                )
        if not any(objective.weight > 0 for objective in objectives):
            raise NovaError("no objective has a weight above 0, so there is nothing to optimise")
        if method not in get_args(Method):
            raise NovaError(f"unknown method {method!r}", fix=f"use one of {', '.join(get_args(Method))}")
        if not (mu > 0 and rho >= 0 and 0 <= beta < 1):
            raise NovaError(f"mu > 0, rho >= 0 and 0 <= beta < 1 are needed, got mu={mu} rho={rho} beta={beta}")
        self.objectives, self.method = tuple(objectives), method
        self.mu, self.rho, self.beta = mu, rho, beta
        self._steps = 0
        self._mean: list[float] = []
        self._variance: list[float] = []
        self._best: list[float] = []

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of everything else here."""
        return tuple(objective.name for objective in self.objectives)

    def observe(self, means: Sequence[float], deviations: Sequence[float]) -> list[float]:
        """Take in a step's mean and deviation of each objective, as measured; returns the weights [K] of raw values.

        A weight is d S / d mean_i: negative where the objective is to be minimised.
        """
        for name, mean, deviation in zip(self.names, means, deviations, strict=True):
            if not (math.isfinite(mean) and 0 <= deviation < math.inf):
                raise NovaError(f"measured mean {mean} and deviation {deviation}", where=f"objective {name!r}")
        self._steps += 1
        before, spread = self._mean or means, self._variance or [0.0] * len(means)
        self._mean = [self.beta * old + (1 - self.beta) * new for old, new in zip(before, means, strict=True)]
        varied = [d if d > CONSTANT * abs(m) else 0.0 for m, d in zip(means, deviations, strict=True)]
        self._variance = [v + (d * d - v) / self._steps for v, d in zip(spread, varied, strict=True)]
        now = self._maximised(self._mean)
        self._best = ideal_point(torch.tensor(self._best, dtype=now.dtype) if self._best else now, now).tolist()
        return self.weights()

    def weights(self) -> list[float]:
        """The weights [K] of raw values, as of the last `observe`; all 0 before it."""
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
        """S(J) of the estimates in units of their deviations, higher is better; 0.0 before anything has varied."""
        scale = self._per_deviation()
        if not (scale > 0).any():
            return 0.0
        return float(score(*self._state(scale), method=self.method, mu=self.mu, rho=self.rho))

    def state_dict(self) -> dict[str, Any]:
        """What has been observed, as plain numbers."""
        return {
            "names": list(self.names),
            "steps": self._steps,
            "mean": list(self._mean),
            "variance": list(self._variance),
            "best": list(self._best),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. NovaError where it is of other objectives."""
        if tuple(state["names"]) != self.names:
            raise NovaError(
                f"the checkpoint's objectives are {', '.join(state['names'])}, the run's {', '.join(self.names)}",
                fix="resume with the objectives that the run began with",
            )
        self._steps = int(state["steps"])
        self._mean, self._variance, self._best = (list(state[name]) for name in ("mean", "variance", "best"))

    @property
    def _directions(self) -> list[Direction]:
        return [objective.direction for objective in self.objectives]

    def _maximised(self, values: Sequence[float]) -> Tensor:
        return maximised(torch.tensor(values, dtype=torch.float64), self._directions)

    def _per_deviation(self) -> Tensor:
        """1/s_i [K]; 0 of what has never varied, and of everything before the first `observe`."""
        variance = torch.tensor(self._variance or [0.0] * len(self.objectives), dtype=torch.float64)
        return torch.where(variance > 0, variance.clamp(min=1e-300).rsqrt(), 0.0)

    def _state(self, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(estimates, ideal, weights) [K], maximised and in units of the deviations."""
        best = torch.tensor(self._best, dtype=torch.float64)
        declared = self._maximised([math.nan if o.ideal is None else o.ideal for o in self.objectives])
        ideal = torch.where(declared.isnan(), best, ideal_point(best, declared))
        weights = torch.tensor([o.weight for o in self.objectives], dtype=torch.float64)
        return self._maximised(self._mean) * scale, ideal * scale, torch.where(scale > 0, weights, 0.0)
