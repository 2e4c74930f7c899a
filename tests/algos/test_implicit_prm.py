"""Process rewards from two models: they add up to the outcome, and vanish where the models are one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from novarl.algos.implicit_prm import outcome, q_values, step_rewards, token_rewards

LOGP = st.floats(-30, 0)


def table(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_golden() -> None:
    logp, ref = table([-1.0, -2.0, -3.0, -9.0]), table([-2.0, -2.5, -1.0, 0.0])
    mask = torch.tensor([[True, True, True, False]])
    rewards = token_rewards(logp, ref, mask, beta=2.0)
    assert rewards.tolist() == [[2.0, 1.0, -4.0, 0.0]]
    assert outcome(rewards).tolist() == [-1.0]
    assert q_values(rewards).tolist() == [[2.0, 3.0, -1.0, -1.0]]
    steps = step_rewards(rewards, torch.tensor([[0, 0, 2, -1]]), count=3)
    assert steps.tolist() == [[3.0, 0.0, -4.0]]


@given(st.lists(st.tuples(LOGP, LOGP, st.booleans(), st.integers(0, 4)), min_size=1, max_size=30), st.floats(0.01, 5))
def test_identities(tokens: list[tuple[float, float, bool, int]], beta: float) -> None:
    """Steps add up to the outcome, the last Q is the outcome, r = Q - Q before, all to 1e-10."""
    logp, ref = table([x[0] for x in tokens]), table([x[1] for x in tokens])
    mask = torch.tensor([[x[2] for x in tokens]])
    rewards = token_rewards(logp, ref, mask, beta=beta)
    total = sum(beta * (p - q) for p, q, chosen, _ in tokens if chosen)
    step = torch.where(mask, torch.tensor([[x[3] for x in tokens]]), -1)
    assert outcome(rewards).item() == pytest.approx(total, abs=1e-10)
    assert step_rewards(rewards, step, count=5).sum().item() == pytest.approx(total, abs=1e-10)
    assert q_values(rewards)[0, -1].item() == pytest.approx(total, abs=1e-10)
    before = torch.nn.functional.pad(q_values(rewards)[..., :-1], (1, 0))
    torch.testing.assert_close(q_values(rewards) - before, rewards, atol=1e-10, rtol=0)


def test_with_the_same_model_all_of_it_is_zero() -> None:
    logp = table([-1.3, -0.1, -7.0])
    rewards = token_rewards(logp, logp.clone(), torch.ones(1, 3, dtype=torch.bool), beta=0.05)
    for found in (rewards, q_values(rewards), step_rewards(rewards, torch.tensor([[0, 1, 1]]), count=2)):
        assert found.eq(0).all()


def test_what_is_not_in_the_mask_may_hold_anything() -> None:
    logp = torch.tensor([-1.0, float("nan"), float("-inf")], requires_grad=True)
    rewards = token_rewards(logp, torch.full((3,), -2.0), torch.tensor([True, False, False]), beta=1.0)
    assert rewards.tolist() == [1.0, 0.0, 0.0]
    rewards.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == [1.0, 0.0, 0.0]


def test_dtype_is_kept_and_a_step_too_many_is_refused() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.zeros(2, 3, dtype=dtype)
        rewards = token_rewards(x, x, torch.ones(2, 3, dtype=torch.bool), beta=0.1)
        found = (rewards, q_values(rewards), step_rewards(rewards, x.long(), count=1))
        assert {value.dtype for value in found} == {dtype}
    with pytest.raises(RuntimeError):
        step_rewards(torch.zeros(1, 2), torch.tensor([[0, 3]]), count=3)
