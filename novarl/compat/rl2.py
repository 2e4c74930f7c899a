"""Enhanced RL2's classes (`RL2/algs.py`) over `novarl.control`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, pstdev
from typing import Any, get_args

import torch
from torch import Tensor

from novarl.control import controllers, hypervolume, objectives as scalarise
from novarl.control.constraints import Constraint, Lagrangian, QuadraticPenalty
from novarl.control.controller import Controller
from novarl.control.objectives import Objective
from novarl.control.pareto import Direction, ParetoArchive
from novarl.core.errors import NovaError, nearest


class AdaptiveKLController:
    """The KL coefficient: `update(kl)` once a step returns the one to use next.

    controller_type   rule                                                      settings
    "exponential"     coef * exp_factor above the target, else * exp_decay      exp_factor, exp_decay
    "linear"          coef * (1 + linear_factor * clip(KL/target - 1, +-0.2))   linear_factor
    "pid"             on log coef and KL/target - 1, with anti-windup           kp, ki, kd
    "schedule"        a curve over schedule_steps, whatever the KL              schedule_type, schedule_steps
    "fixed"           initial_coef

    `controller` is the `novarl.control.controllers` object behind it.
    """

    def __init__(
        self,
        initial_coef: float = 0.2,
        target_kl: float = 0.01,
        controller_type: str = "exponential",
        exp_factor: float = 1.03,
        exp_decay: float = 0.99,
        linear_factor: float = 0.5,
        kp: float = 0.1,
        ki: float = 0.01,
        kd: float = 0.001,
        schedule_type: str = "cosine",
        schedule_steps: int = 1000,
        min_coef: float = 0.001,
        max_coef: float = 10.0,
    ) -> None:
        end = initial_coef * math.exp(-3.0) if schedule_type == "exponential" else 0.0
        kinds: dict[str, tuple[str, dict[str, Any]]] = {
            "exponential": ("two_speed", {"up": exp_factor, "down": exp_decay}),
            "linear": ("linear", {"factor": linear_factor}),
            "pid": ("pid", {"kp": kp, "ki": ki, "kd": kd}),
            "schedule": ("schedule", {"shape": schedule_type, "total_steps": schedule_steps, "final_coef": end}),
            "fixed": ("fixed", {}),
        }
        if controller_type not in kinds:
            what = f"unknown controller {controller_type!r}"
            raise NovaError(what, where="controller_type", fix=nearest(controller_type, kinds))
        kind, settings = kinds[controller_type]
        adaptive = controller_type not in ("schedule", "fixed")
        self._least = min_coef if controller_type == "schedule" else 0.0  # below which the curve itself may go
        settings |= {"coef": initial_coef, "max_coef": max_coef, "min_coef": min_coef if adaptive else 0.0}
        self.controller: Controller = controllers.make(kind, target=target_kl, **settings)
        self.controller_type, self.target_kl = controller_type, target_kl
        self.step_count, self._last, self._sum = 0, 0.0, 0.0

    @property
    def coef(self) -> float:
        """The coefficient to use now."""
        return max(self.controller.coef, self._least)

    def update(self, current_kl: float, step: int | None = None) -> float:
        """The coefficient after a step in which `current_kl` was measured. `step` places a schedule; 0 is its start."""
        if step is not None and isinstance(self.controller, controllers.Schedule):
            self.controller.step = step - 1
        if not math.isnan(current_kl):
            self._last, self._sum = float(current_kl), self._sum + float(current_kl)
            self.step_count += 1
        self.controller.update(float(current_kl))
        return self.coef

    def reset(self) -> None:
        """Forget every update: the coefficient is the initial one again."""
        self.controller.reset()
        self.step_count, self._last, self._sum = 0, 0.0, 0.0

    def get_stats(self) -> dict[str, Any]:
        return {
            "current_coef": self.coef,
            "target_kl": self.target_kl,
            "current_kl": self._last,
            "avg_kl": self._sum / self.step_count if self.step_count else 0.0,
            "controller_type": self.controller_type,
            "step_count": self.step_count,
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON values; with `load_state_dict` an exact round trip."""
        counts = {"step_count": self.step_count, "current_kl": self._last, "sum_kl": self._sum}
        return {"controller": self.controller.state_dict(), **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(state["controller"])
        self.step_count, self._last, self._sum = state["step_count"], state["current_kl"], state["sum_kl"]


class ConstraintOptimizer:
    """KL of at most `kl_constraint`, entropy of at least `entropy_constraint`.

    With `use_lagrangian`, multipliers follow the violations (`update_lagrangian_multipliers`), and
    `get_lagrangian_loss` is lambda (KL - d) + nu (H_0 - H). Otherwise `compute_constraint_loss` is the penalty
    p max(0, violation)^2. Given tensors, both losses are differentiable in KL and entropy.
    """

    def __init__(
        self,
        kl_constraint: float = 0.01,
        entropy_constraint: float = 0.01,
        use_lagrangian: bool = True,
        lagrangian_lr: float = 0.01,
        constraint_violation_penalty: float = 10.0,
    ) -> None:
        self.use_lagrangian, self.constraint_violation_penalty = use_lagrangian, constraint_violation_penalty
        make: Callable[..., Constraint] = partial(Lagrangian, lr=lagrangian_lr, init=1.0)
        if not use_lagrangian:
            make = partial(QuadraticPenalty, weight=2 * constraint_violation_penalty)
        self.kl_constraint, self.entropy_constraint = kl_constraint, entropy_constraint
        self.kl, self.entropy = make(sense="max", limit=kl_constraint), make(sense="min", limit=entropy_constraint)
        self._initial = self.state_dict()

    @property
    def kl_multiplier(self) -> float:
        """lambda, the weight of KL in the loss."""
        return self.kl.coef

    @property
    def entropy_multiplier(self) -> float:
        """nu, the weight of entropy in the loss."""
        return self.entropy.coef

    def check_constraints(self, kl_div: float, entropy: float) -> dict[str, Any]:
        """Whether the constraints hold, and by how much they are violated; counted in `get_stats`."""
        over, under = (max(0.0, float(value)) for value in self._violations(kl_div, entropy))
        self._checks += 1
        self._kl_sum, self._entropy_sum = self._kl_sum + over, self._entropy_sum + under
        self._violated += (over > 0) + (under > 0)
        satisfied = {"kl_satisfied": over == 0, "entropy_satisfied": under == 0}
        return {**satisfied, "kl_violation": over, "entropy_violation": under}

    def update_lagrangian_multipliers(self, kl_div: float, entropy: float) -> None:
        """One step of the multipliers, by the violation relative to the limit. Without `use_lagrangian`, the weights
        become the gradient of the penalty at this measurement."""
        self.kl.update(float(kl_div))
        self.entropy.update(float(entropy))

    def get_lagrangian_loss(self, kl_div: float | Tensor, entropy: float | Tensor) -> Tensor:
        """lambda (KL - d) + nu (H_0 - H), to be added to a loss that is minimized; 0 without `use_lagrangian`."""
        if not self.use_lagrangian:
            return torch.zeros(())
        over, under = self._violations(kl_div, entropy)
        return self.kl_multiplier * over + self.entropy_multiplier * under

    def compute_constraint_loss(self, kl_div: float | Tensor, entropy: float | Tensor) -> Tensor:
        """p max(0, KL - d)^2 + p max(0, H_0 - H)^2."""
        over, under = (value.clamp(min=0).square() for value in self._violations(kl_div, entropy))
        return self.constraint_violation_penalty * (over + under)

    def reset(self) -> None:
        """Forget every update and every check."""
        self.load_state_dict(self._initial)

    def get_stats(self) -> dict[str, Any]:
        checks = max(self._checks, 1)
        return {
            "kl_constraint": self.kl_constraint,
            "entropy_constraint": self.entropy_constraint,
            "kl_multiplier": self.kl_multiplier,
            "entropy_multiplier": self.entropy_multiplier,
            "avg_kl_violation": self._kl_sum / checks,
            "avg_entropy_violation": self._entropy_sum / checks,
            "constraint_violations": self._violated,
        }

    _checks, _violated, _kl_sum, _entropy_sum = 0, 0, 0.0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """JSON values; with `load_state_dict` an exact round trip."""
        counts = [self._checks, self._violated, self._kl_sum, self._entropy_sum]
        return {"kl": self.kl.state_dict(), "entropy": self.entropy.state_dict(), "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kl.load_state_dict(state["kl"])
        self.entropy.load_state_dict(state["entropy"])
        self._checks, self._violated, self._kl_sum, self._entropy_sum = state["counts"]

    def _violations(self, kl_div: float | Tensor, entropy: float | Tensor) -> tuple[Tensor, Tensor]:
        return torch.as_tensor(kl_div) - self.kl_constraint, self.entropy_constraint - torch.as_tensor(entropy)


MINIMISED = ("kl", "kl_penalty", "length")
"""Objectives of which less is better where no direction is given."""
RANKING = ("pareto_dominance", "hypervolume")
"""They say which of finished solutions is better, and have no gradient."""
METHODS = (*get_args(scalarise.Method), *RANKING)


class MultiObjectiveOptimizer:
    """Several objectives as one loss, and the archive of solutions that none dominates.

    Values are as measured; `directions` says which are to be minimized ("min"), by default KL and length. The loss is
    -S of `novarl.control.objectives`, so that improving an objective always lowers it; given tensors it is
    differentiable. Weights say how much an objective counts; the sign of a negative weight of a minimized objective
    repeats its direction and is dropped.
    """

    def __init__(
        self,
        objectives: Sequence[str] = ("reward", "kl_penalty", "entropy"),
        objective_weights: Mapping[str, float] | None = None,
        method: str = "weighted_sum",
        diversity_weight: float | None = None,
        archive_size: int = 100,
        *,
        pareto_method: str | None = None,
        directions: Mapping[str, Direction] | None = None,
    ) -> None:
        if diversity_weight is not None:
            what = "the archive is pruned by crowding distance, which needs no weight"
            raise NovaError(what, where="diversity_weight", fix="leave it out")
        self.method = pareto_method or method
        if self.method not in METHODS:
            raise NovaError(f"unknown method {self.method!r}", where="method", fix=nearest(self.method, METHODS))
        given, weights = directions or {}, objective_weights or {}
        for name in (*given, *weights):
            if name not in objectives:
                raise NovaError(f"unknown objective {name!r}", where="objectives", fix=nearest(name, objectives))
        self.objectives = tuple(self._objective(name, given.get(name), weights.get(name, 1.0)) for name in objectives)
        self._directions = [objective.direction for objective in self.objectives]
        self.archive = ParetoArchive(archive_size, directions=self._directions)
        self._data: dict[str, Mapping[str, Any]] = {}
        self._seen: list[list[float]] = []
        self._ideal: Tensor | None = None

    @staticmethod
    def _objective(name: str, direction: Direction | None, weight: float) -> Objective:
        direction = direction or ("min" if name in MINIMISED else "max")
        return Objective(name, direction, weight=abs(weight) if direction == "min" else weight)

    @property
    def names(self) -> list[str]:
        return [objective.name for objective in self.objectives]

    def compute_pareto_loss(self, objectives_dict: Mapping[str, float | Tensor]) -> Tensor:
        """What a training step minimizes. "pareto_dominance" and "hypervolume" rank finished solutions and have no
        gradient: their loss is the weighted sum."""
        values = torch.stack([torch.as_tensor(value).float().mean() for value in self._row(objectives_dict)])
        estimates = scalarise.maximised(values, self._directions)
        now = estimates.detach()
        self._ideal = now if self._ideal is None else scalarise.ideal_point(self._ideal, now)
        weights = torch.tensor([objective.weight for objective in self.objectives])
        method = "weighted_sum" if self.method in RANKING else self.method
        return -scalarise.score(estimates, self._ideal, weights, method=method)

    def update_pareto_archive(
        self, objectives_dict: Mapping[str, float | Tensor], solution_data: Mapping[str, Any] | None = None
    ) -> bool:
        """Offer a solution, best an evaluated checkpoint; returns whether it is on the front now."""
        row = [float(value) for value in self._row(objectives_dict)]
        name = f"solution {len(self._seen)}"
        added = self.archive.add(name, row, step=len(self._seen))
        self._seen.append(row)
        if added:
            kept = {entry.name for entry in self.archive.front()}
            self._data = {key: data for key, data in self._data.items() if key in kept} | {name: solution_data or {}}
        return added

    def get_pareto_front(self) -> list[dict[str, float]]:
        """The objectives of each member, from the least to the greatest first one."""
        return [dict(zip(self.names, entry.vector, strict=True)) for entry in self.archive.front()]

    def get_solutions(self) -> list[Mapping[str, Any]]:
        """The `solution_data` of each member, in the order of the front."""
        return [self._data[entry.name] for entry in self.archive.front()]

    def hypervolume(self, reference_point: Mapping[str, float]) -> float:
        """The volume that the front dominates beyond a reference point, exactly."""
        turned = partial(scalarise.maximised, directions=self._directions)
        points = [turned(torch.tensor(entry.vector, dtype=torch.float64)) for entry in self.archive.front()]
        reference = torch.tensor([float(value) for value in self._row(reference_point)], dtype=torch.float64)
        return hypervolume.hypervolume(points, turned(reference))

    def get_stats(self) -> dict[str, Any]:
        columns = dict(zip(self.names, zip(*self._seen, strict=True), strict=True)) if self._seen else {}
        best = {"max": max, "min": min}
        return {
            "pareto_size": len(self.archive),
            "total_evaluations": len(self._seen),
            "pareto_method": self.method,
            "ideal_point": {one.name: best[one.direction](columns[one.name]) for one in self.objectives if columns},
            "objective_ranges": {
                name: {"min": min(column), "max": max(column), "mean": fmean(column), "std": pstdev(column)}
                for name, column in columns.items()
            },
        }

    def _row(self, values: Mapping[str, Any]) -> list[Any]:
        if missing := [name for name in self.names if name not in values]:
            fix = f"give {', '.join(self.names)}"
            raise NovaError(f"the objective {missing[0]!r} was not measured", where="objectives", fix=fix)
        return [values[name] for name in self.names]
