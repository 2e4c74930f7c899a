"""AdamW with a stateless learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from novarl.core.errors import NotFinite, NovaError
from novarl.distributed.shard import full, local, norm_of, sharding_of, spread

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Decay factor as a function of training progress, starting at 1."""


@dataclass(frozen=True, slots=True)
class OptimSettings:
    """AdamW (Loshchilov & Hutter, https://arxiv.org/abs/1711.05101) and its learning-rate schedule.

    The rate rises linearly over `warmup_steps` updates, then decays by `schedule` from `lr` to `min_lr_ratio * lr` at
    `total_steps`. `max_grad_norm` 0 disables clipping.
    """

    lr: float = 1e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    total_steps: int = 0

    def rate(self, update: int) -> float:
        """The learning rate of update number `update`, counted from 0."""
        if update < self.warmup_steps:
            return self.lr * (update + 1) / self.warmup_steps
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (update - self.warmup_steps) / span)
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * SCHEDULES[self.schedule](progress))


class Optimizer:
    """AdamW over a model's trainable parameters, with state keyed by parameter name.

    It uses torch's functional AdamW, because the class imports torch's compiler, which takes a second at start-up.
    """

    def __init__(self, model: nn.Module, settings: OptimSettings) -> None:
        self.settings, self.sharding = settings, sharding_of(model)
        self.update = 0
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        decayed = [name for name, parameter in self.parameters.items() if parameter.ndim >= 2]
        rest = [name for name, parameter in self.parameters.items() if parameter.ndim < 2]
        self.groups = ((decayed, settings.weight_decay), (rest, 0.0))
        self.moments: dict[str, dict[str, Tensor]] = {}

    def gradients(self) -> list[Tensor]:
        """The gradients of all parameters (zeros if missing), in a fixed order."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def drop_gradients(self) -> None:
        """Clear accumulated gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self) -> tuple[float, float]:
        """Clip, update the weights and clear the gradients; returns (gradient norm before clipping, learning rate).

        Raises NotFinite if the gradient is not finite.
        """
        gradients = self.gradients()
        norm = norm_of(gradients)
        if not torch.isfinite(norm):
            raise NotFinite(
                f"the gradient of update {self.update} is not finite (norm {norm.item()})",
                where="optim",
                fix="lower optim.lr, check the rewards of this step, or use dtype=float32",
            )
        if self.settings.max_grad_norm > 0:
            factor = (self.settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
        rate = self.settings.rate(self.update)
        self._adamw(rate)
        if self.sharding is not None:
            self.sharding.moved()
        self.drop_gradients()
        self.update += 1
        return norm.item(), rate

    @torch.no_grad()
    def _adamw(self, rate: float) -> None:
        for names, decay in self.groups:
            parameters: list[Tensor] = [self.parameters[name] for name in names]
            moments = [self.moments.get(name) or self._first(name) for name in names]
            adamw(
                [local(parameter) for parameter in parameters],
                [local(parameter.grad) for parameter in parameters if parameter.grad is not None],
                [local(of["exp_avg"]) for of in moments],
                [local(of["exp_avg_sq"]) for of in moments],
                [],
                [of["step"] for of in moments],
                fused=True,
                amsgrad=False,
                beta1=self.settings.betas[0],
                beta2=self.settings.betas[1],
                lr=rate,
                weight_decay=decay,
                eps=self.settings.eps,
                maximize=False,
            )

    def _first(self, name: str) -> dict[str, Tensor]:
        parameter = self.parameters[name]
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        zeros = (torch.zeros_like(parameter, memory_format=torch.preserve_format) for _ in range(2))
        self.moments[name] = dict(zip(("step", "exp_avg", "exp_avg_sq"), (step, *zeros), strict=True))
        return self.moments[name]

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors, also of a sharded model; all ranks call it."""
        moments = {
            name: {key: full(value) for key, value in self.moments[name].items()}
            for name in self.parameters
            if name in self.moments
        }
        return {"update": self.update, "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["moments"] and state["moments"].keys() != self.parameters.keys():
            raise NovaError(
                "the optimizer state in the checkpoint belongs to another model",
                where="resume",
                fix="use the model of the original run",
            )
        self.update = int(state["update"])
        # Including the step count, which fused AdamW reads on the weights' device.
        self.moments = {
            name: {
                key: value.to(self.parameters[name].device) if key == "step" else spread(value, self.parameters[name])
                for key, value in moments.items()
            }
            for name, moments in state["moments"].items()
        }


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The weights of a module without its own directory in a checkpoint; tied weights once."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@torch.no_grad()
def put_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """The inverse of `weights_of`. Raises NovaError if they belong to another module."""
    parameters = dict(module.named_parameters())
    if parameters.keys() != weights.keys():
        raise NovaError(
            "the weights in the checkpoint belong to another model",
            where="resume",
            fix="use the model of the original run",
        )
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
