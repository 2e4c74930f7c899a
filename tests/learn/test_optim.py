"""Schedules by hand-computed numbers; the optimiser's state survives; a gradient that is not finite stops the run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from novarl.core.errors import NovaError
from novarl.learn.optim import Optimizer, OptimSettings


def test_schedule_values() -> None:
    cosine = OptimSettings(lr=1.0, schedule="cosine", warmup_steps=2, total_steps=6, min_lr_ratio=0.1)
    assert [round(cosine.rate(update), 6) for update in range(7)] == [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1]
    linear = OptimSettings(lr=2.0, schedule="linear", total_steps=4)
    assert [linear.rate(update) for update in range(6)] == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert OptimSettings(lr=3.0).rate(10**6) == 3.0


def train(model: nn.Module, optimizer: Optimizer, updates: range) -> None:
    for update in updates:
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(update))
        (model(inputs) ** 2).mean().backward()
        optimizer.step()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_resume_is_bit_identical() -> None:
    settings = OptimSettings(lr=0.1, weight_decay=0.1, schedule="cosine", total_steps=6, max_grad_norm=0.01)
    whole = linear()
    start = whole.weight.detach().clone()
    train(whole, optimizer := Optimizer(whole, settings), range(6))
    assert not torch.equal(start, whole.weight), "the weights must move for this test to say anything"
    first = linear()
    train(first, optimizer := Optimizer(first, settings), range(3))
    second = linear()
    second.load_state_dict(first.state_dict())
    again = Optimizer(second, settings)
    again.load_state_dict(optimizer.state_dict())
    train(second, again, range(3, 6))
    assert torch.equal(whole.weight, second.weight) and torch.equal(whole.bias, second.bias)


def test_clipping_limits_the_step_and_reports_the_norm_before() -> None:
    model = linear()
    optimizer = Optimizer(model, OptimSettings(lr=0.1, max_grad_norm=0.5))
    (model(torch.ones(1, 3)).sum() * 100).backward()
    norm, rate = optimizer.step()
    assert norm > 100 and rate == 0.1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_are_not_finite_stop_the_run() -> None:
    model = linear()
    optimizer = Optimizer(model, OptimSettings())
    (model(torch.ones(1, 3)).sum() * float("nan")).backward()
    with pytest.raises(NovaError, match="not finite"):
        optimizer.step()


def test_another_models_state_is_refused() -> None:
    model = linear()
    optimizer = Optimizer(model, OptimSettings())
    train(model, optimizer, range(1))
    with pytest.raises(NovaError, match="another model"):
        Optimizer(nn.Sequential(nn.Linear(3, 2)), OptimSettings()).load_state_dict(optimizer.state_dict())
