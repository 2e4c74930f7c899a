"""Ways into TRL's trainers without training: an object that has what a loss function reads, and single statements."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def stand_in(**more: Any) -> Any:
    """A trainer: one process, no peft, no auxiliary loss."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction="sum": x,
        unwrap_model=lambda x: x,
    )
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **more,
    )


def recorded(loss: Tensor, at: Tensor, inside: Tensor | None = None) -> dict[str, Any]:
    """The loss as TRL would minimise it and its gradient, 0 outside the mask."""
    (gradient,) = torch.autograd.grad(loss, at)
    gradient = gradient if inside is None else torch.where(inside, gradient, 0.0)
    return {"loss": loss.item(), "gradient": gradient.tolist()}


def statements(function: Callable[..., Any], begin: str, end: str, **names: Any) -> dict[str, Any]:
    """The names after running, of a function too large to call, the statements from one that begins so to one that
    ends so, both included; they see their module's globals and `names`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    for node in ast.walk(tree):
        for block in (getattr(node, field, None) for field in ("body", "orelse")):
            if not isinstance(block, list):
                continue
            text = [ast.unparse(statement) for statement in block]
            first = next((i for i, line in enumerate(text) if line.startswith(begin)), None)
            last = next((i for i, line in enumerate(text) if line.startswith(end)), None)
            if first is not None and last is not None:
                module = ast.Module(block[first : last + 1], type_ignores=[])
                space = {**vars(sys.modules[function.__module__]), **names}
                exec(compile(module, f"<{function.__qualname__}>", "exec"), space)
                return space
    raise LookupError(f"{function.__qualname__} has no statements from {begin!r} to {end!r}: read TRL's source again")
