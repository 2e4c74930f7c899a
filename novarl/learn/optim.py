"""AdamW with a stateless schedule, and gradients that are the same however the batch was cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Decay factor by the share of the run that is done, from 1 at its start."""


@dataclass(frozen=True, slots=True)
class OptimSettings:
    """AdamW (Loshchilov & Hutter, https://arxiv.org/abs/1711.05101) and its learning-rate schedule.

    The rate rises linearly over `warmup_steps` updates, then decays by `schedule` from `lr` to `min_lr_ratio * lr` at
    `total_steps`. `max_grad_norm` 0 clips nothing.
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
    """AdamW over a model's trainable parameters, its state addressed by parameter name."""

    def __init__(self, model: nn.Module, settings: OptimSettings) -> None:
        self.settings = settings
        self.update = 0
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        decayed = [parameter for parameter in self.parameters.values() if parameter.ndim >= 2]
        rest = [parameter for parameter in self.parameters.values() if parameter.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def gradients(self) -> list[Tensor]:
        """The gradient of every parameter, zeros where none arrived, in a fixed order."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def drop_gradients(self) -> None:
        """Forget what has been accumulated since the last step."""
        self.adamw.zero_grad(set_to_none=True)

    def step(self) -> tuple[float, float]:
        """Clip, move the weights, forget the gradients; returns (gradient norm before clipping, learning rate).

        A gradient that is not finite is an error, never a silent step.
        """
        gradients = self.gradients()
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            raise NovaError(
                f"the gradient of update {self.update} is not finite (norm {norm.item()})",
                where="optim",
                fix="lower optim.lr, look at the rewards of this step, or use dtype=float32",
            )
        if self.settings.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self.settings.max_grad_norm, norm)
        rate = self.settings.rate(self.update)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.drop_gradients()
        self.update += 1
        return norm.item(), rate

    def state_dict(self) -> dict[str, Any]:
        moments = {
            name: {key: value for key, value in self.adamw.state[parameter].items()}
            for name, parameter in self.parameters.items()
            if parameter in self.adamw.state
        }
        return {"update": self.update, "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["moments"] and state["moments"].keys() != self.parameters.keys():
            raise NovaError(
                "the checkpoint's optimiser belongs to another model",
                where="resume",
                fix="use the model the run was started with",
            )
        self.update = int(state["update"])
        for name, moments in state["moments"].items():
            parameter = self.parameters[name]
            # The step count too: the fused AdamW reads it where the weights are.
            self.adamw.state[parameter] = {key: value.to(parameter.device) for key, value in moments.items()}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The weights of a module that a checkpoint has no folder for, each once, however many layers share it."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@torch.no_grad()
def put_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """The inverse of `weights_of`. NovaError where they are of another module."""
    parameters = dict(module.named_parameters())
    if parameters.keys() != weights.keys():
        raise NovaError(
            "the checkpoint's weights belong to another model",
            where="resume",
            fix="use the model the run was started with",
        )
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
