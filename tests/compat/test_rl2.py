"""The classes of enhanced RL2: its document's code with another import, its formulas, and what it promised to do."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from novarl.algos import advantages
from novarl.compat import (
    AdaptiveKLController,
    ConstraintOptimizer,
    MultiObjectiveOptimizer,
    compute_advantages_unified,
)
from novarl.core.errors import NovaError


def test_the_documents_code_runs_with_another_import() -> None:
    # Adaptive KL penalty
    kl_controller = AdaptiveKLController(
        controller_type='exponential',
        target_kl=0.01,
        initial_coef=0.2
    )  # fmt: skip

    # Multi-objective optimization
    mo_optimizer = MultiObjectiveOptimizer(
        objectives=['reward', 'kl_penalty', 'entropy'],
        method='weighted_sum'
    )  # fmt: skip
    assert kl_controller.update(0.05) == 0.2 * 1.03
    loss = mo_optimizer.compute_pareto_loss({"reward": 1.0, "kl_penalty": 0.2, "entropy": 0.5})
    assert loss.item() == pytest.approx(-(1.0 - 0.2 + 0.5))


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = "import novarl.compat, sys; assert not {'torch', 'transformers'} & set(sys.modules), 'loaded'"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_exponential_rule_is_the_documents() -> None:
    controller, coef = AdaptiveKLController(), 0.2
    for measured in (0.05, 0.005, 0.02, 0.0):
        coef *= 1.03 if measured > 0.01 else 0.99
        assert controller.update(measured) == pytest.approx(coef, rel=1e-12)


def test_the_linear_rule_is_the_documents_with_a_bound_on_the_error() -> None:
    controller = AdaptiveKLController(controller_type="linear")
    assert controller.update(0.011) == pytest.approx(0.2 * (1 + 0.5 * 0.1))
    before = controller.coef
    assert controller.update(1.0) == pytest.approx(before * (1 + 0.5 * 0.2))  # and not 50 times as much


@pytest.mark.parametrize("shape", ["cosine", "linear", "exponential", "warmup_cosine"])
def test_schedules_are_the_documents(shape: str) -> None:
    controller = AdaptiveKLController(controller_type="schedule", schedule_type=shape, schedule_steps=20)
    for step in range(1, 25):
        p = min(step / 20, 1.0)
        q = (p - 0.1) / 0.9
        wanted = {
            "cosine": (1 + math.cos(math.pi * p)) / 2,
            "linear": 1 - p,
            "exponential": math.exp(-3 * p),
            "warmup_cosine": p / 0.1 if p < 0.1 else (1 + math.cos(math.pi * q)) / 2,
        }[shape]
        assert controller.update(1.0) == pytest.approx(max(0.2 * wanted, 0.001), rel=1e-9)
    assert controller.update(1.0, step=0) == pytest.approx(0.001 if shape == "warmup_cosine" else 0.2)


@pytest.mark.parametrize("kind", ["exponential", "linear", "pid"])
def test_a_controller_brings_the_kl_of_a_simulated_policy_to_its_target(kind: str) -> None:
    settings = {"pid": {"kp": 0.2, "ki": 0.05, "kd": 0.1}}.get(kind, {})
    controller = AdaptiveKLController(controller_type=kind, target_kl=0.02, **settings)
    measured = [0.002 / controller.coef for _ in range(600) if controller.update(0.002 / controller.coef)]
    assert sum(measured[-100:]) / 100 == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("kind", ["exponential", "linear", "pid", "schedule", "fixed"])
def test_reset_and_a_saved_state_go_on_exactly(kind: str) -> None:
    def fresh() -> AdaptiveKLController:
        return AdaptiveKLController(controller_type=kind, schedule_steps=50)

    measured = [0.03, 0.001, 0.02, 0.5, 0.0]
    one = fresh()
    first = [one.update(kl) for kl in measured]
    other = fresh()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [other.update(kl) for kl in measured] == [one.update(kl) for kl in measured]
    assert other.get_stats() == one.get_stats()
    one.reset()
    assert one.get_stats() == fresh().get_stats()
    assert [one.update(kl) for kl in measured] == first
    stats = one.get_stats()
    assert stats["step_count"] == 5 and stats["current_kl"] == 0.0 and stats["controller_type"] == kind
    assert stats["current_coef"] == one.coef and stats["avg_kl"] == pytest.approx(sum(measured) / 5)


def test_a_fixed_coefficient_stays_as_it_is_also_where_it_is_0() -> None:
    controller = AdaptiveKLController(controller_type="fixed", initial_coef=0.0)
    assert controller.update(5.0) == 0.0 and controller.coef == 0.0


def test_a_controller_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(NovaError, match="did you mean linear"):
        AdaptiveKLController(controller_type="linaer")


def test_multipliers_rise_while_a_constraint_is_violated_and_fall_while_it_holds() -> None:
    constraints = ConstraintOptimizer(kl_constraint=0.02, entropy_constraint=0.5, lagrangian_lr=0.1)
    found = constraints.check_constraints(0.05, 0.7)
    assert found["kl_satisfied"] is False and found["entropy_satisfied"] is True
    assert found["kl_violation"] == pytest.approx(0.03) and found["entropy_violation"] == 0.0
    constraints.update_lagrangian_multipliers(0.05, 0.7)
    assert constraints.kl_multiplier == pytest.approx(1.1)  # 1 + lr clip((0.05 - 0.02) / 0.02, 1)
    assert constraints.entropy_multiplier == pytest.approx(1 - 0.1 * 0.2 / 0.5)
    stats = constraints.get_stats()
    assert stats["constraint_violations"] == 1 and stats["avg_kl_violation"] == pytest.approx(0.03)
    again = ConstraintOptimizer(kl_constraint=0.02, entropy_constraint=0.5, lagrangian_lr=0.1)
    again.load_state_dict(json.loads(json.dumps(constraints.state_dict())))
    assert again.get_stats() == stats
    constraints.reset()
    assert constraints.get_stats()["kl_multiplier"] == 1.0 and constraints.get_stats()["constraint_violations"] == 0


def test_the_lagrangian_loss_has_a_gradient_inside_the_limit_too() -> None:
    constraints = ConstraintOptimizer(kl_constraint=0.02, entropy_constraint=0.5)
    kl, entropy = torch.tensor(0.01, requires_grad=True), torch.tensor(0.9, requires_grad=True)
    constraints.get_lagrangian_loss(kl, entropy).backward()
    assert kl.grad is not None and kl.grad.item() == constraints.kl_multiplier == 1.0
    assert entropy.grad is not None and entropy.grad.item() == -constraints.entropy_multiplier


def test_the_penalty_is_the_documents_and_its_weight_is_its_gradient() -> None:
    constraints = ConstraintOptimizer(0.02, 0.5, use_lagrangian=False, constraint_violation_penalty=10.0)
    kl, entropy = torch.tensor(0.05, requires_grad=True), torch.tensor(0.4, requires_grad=True)
    loss = constraints.compute_constraint_loss(kl, entropy)
    assert loss.item() == pytest.approx(10 * 0.03**2 + 10 * 0.1**2)
    loss.backward()
    constraints.update_lagrangian_multipliers(0.05, 0.4)
    assert kl.grad is not None and kl.grad.item() == pytest.approx(constraints.kl_multiplier)
    assert entropy.grad is not None and -entropy.grad.item() == pytest.approx(constraints.entropy_multiplier)
    assert constraints.get_lagrangian_loss(kl, entropy).item() == 0.0
    assert constraints.compute_constraint_loss(0.01, 0.6).item() == 0.0


def test_a_bandit_under_the_lagrangian_ends_at_its_kl_limit() -> None:
    """max E[r] with KL(pi || uniform) <= 0.2: the multiplier finds the limit."""
    reward, logits = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, requires_grad=True)
    constraints = ConstraintOptimizer(kl_constraint=0.2, entropy_constraint=0.1, lagrangian_lr=0.05)
    optimizer = torch.optim.SGD([logits], lr=0.3)
    for _ in range(1500):
        p = logits.softmax(0)
        entropy = -(p * p.log()).sum()
        kl = math.log(3) - entropy
        loss = -(p * reward).sum() + constraints.get_lagrangian_loss(kl, entropy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        constraints.update_lagrangian_multipliers(kl.item(), entropy.item())
    assert kl.item() == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("method", ["weighted_sum", "tchebycheff", "pareto_dominance", "hypervolume"])
def test_improving_an_objective_never_raises_the_loss(method: str) -> None:
    weights = {"reward": 1.0, "kl_penalty": -0.1, "entropy": 0.01}
    optimizer = MultiObjectiveOptimizer(objective_weights=weights, method=method)
    good = optimizer.compute_pareto_loss({"reward": 1.0, "kl_penalty": 0.01, "entropy": 0.5})
    bad = optimizer.compute_pareto_loss({"reward": 0.0, "kl_penalty": 1.0, "entropy": 0.5})
    assert good < bad
    values = {name: torch.tensor(value, requires_grad=True) for name, value in (("reward", 0.2), ("kl_penalty", 0.3))}
    optimizer.compute_pareto_loss({**values, "entropy": 0.5}).backward()
    assert values["reward"].grad is not None and values["reward"].grad < 0  # gradient descent raises the reward
    assert method == "tchebycheff" or (values["kl_penalty"].grad is not None and values["kl_penalty"].grad > 0)


def test_the_archive_keeps_what_nothing_dominates_with_its_data() -> None:
    optimizer = MultiObjectiveOptimizer(["reward", "kl_penalty"], archive_size=2)
    assert optimizer.update_pareto_archive({"reward": 0.5, "kl_penalty": 0.2}, {"step": 1})
    assert not optimizer.update_pareto_archive({"reward": 0.4, "kl_penalty": 0.3})
    assert optimizer.update_pareto_archive({"reward": 0.9, "kl_penalty": 0.5}, {"step": 3})
    front = optimizer.get_pareto_front()
    assert front == [{"reward": 0.5, "kl_penalty": 0.2}, {"reward": 0.9, "kl_penalty": 0.5}]
    assert optimizer.get_solutions() == [{"step": 1}, {"step": 3}]
    box = optimizer.hypervolume({"reward": 0.0, "kl_penalty": 1.0})
    assert box == pytest.approx(0.5 * 0.8 + 0.4 * 0.5)
    stats = optimizer.get_stats()
    assert stats["pareto_size"] == 2 and stats["total_evaluations"] == 3
    assert stats["ideal_point"] == {"reward": 0.9, "kl_penalty": 0.2}
    assert stats["objective_ranges"]["reward"]["min"] == 0.4
    assert optimizer.update_pareto_archive({"reward": 1.0, "kl_penalty": 0.1}, {"step": 4})
    assert optimizer.get_solutions() == [{"step": 4}]


def test_objectives_are_refused_with_reasons() -> None:
    with pytest.raises(NovaError, match="did you mean tchebycheff"):
        MultiObjectiveOptimizer(method="tchebychef")
    assert MultiObjectiveOptimizer(pareto_method="tchebycheff").method == "tchebycheff"
    with pytest.raises(NovaError, match="the direction is max"):
        MultiObjectiveOptimizer(objective_weights={"reward": -1.0})
    with pytest.raises(NovaError, match="'entropy' was not measured"):
        MultiObjectiveOptimizer().compute_pareto_loss({"reward": 1.0, "kl_penalty": 0.0})


def trajectories() -> list[dict[str, Any]]:
    """Two, of three and two chosen tokens, the first with a gap."""
    noise = torch.Generator().manual_seed(0)

    def some(count: int) -> torch.Tensor:
        return torch.randn(count, generator=noise)

    found = []
    for mask in ([0, 1, 1, 0, 1], [0, 1, 1]):
        chosen = torch.tensor(mask)
        count = len(mask)
        logps = -some(count).abs()
        found.append(
            {
                "rewards": some(count) * chosen,
                "values": some(count),
                "action_mask": chosen,
                "logps": logps,
                "behavior_logps": logps + 0.3 * some(count),
            }
        )
    return found


@pytest.mark.parametrize(
    ("method", "settings", "function", "options"),
    [
        ("gae", {"gamma": 0.99, "lamda": 0.9}, "gae", {"gamma": 0.99, "lam": 0.9}),
        ("td_lambda", {"lamda": 0.9}, "td_lambda", {"lam": 0.9}),
        ("vtrace", {"rho_bar": 0.9, "c_bar": 0.8}, "vtrace", {"rho_max": 0.9, "c_max": 0.8}),
        ("retrace", {"lamda": 0.9}, "retrace", {"lam": 0.9}),
        ("clipped_is", {"clip_ratio": 0.1}, "clipped_is", {"rho_min": 0.9, "rho_max": 1.1}),
        ("multistep", {"n_steps": 2}, "n_step", {"n": 2}),
        ("multistep", {"bootstrap_method": "mc"}, "monte_carlo", {}),
    ],
)
def test_advantages_are_those_of_the_library_for_each_trajectory_alone(
    method: str, settings: dict[str, Any], function: str, options: dict[str, Any]
) -> None:
    ours = compute_advantages_unified(trajectories(), method, **settings)
    for got, one in zip(ours, trajectories(), strict=True):
        columns = {name: one[name][None] for name in ("rewards", "values")}
        columns |= {"mask": one["action_mask"].bool()[None], "bootstrap": torch.zeros(1)}
        if function in ("vtrace", "retrace", "clipped_is"):
            columns |= {"logp": one["logps"][None], "behavior_logp": one["behavior_logps"][None]}
        advantage, returns = getattr(advantages, function)(**columns, **options)
        torch.testing.assert_close(got["advantages"], advantage[0])
        torch.testing.assert_close(got["returns"], returns[0])


def test_the_bootstrap_is_the_value_past_the_end_and_otherwise_0() -> None:
    """RL2 used the value of the last state itself, which shifts every advantage by it."""
    ended, cut = trajectories()[:1], [{**trajectories()[0], "bootstrap": 2.0}]
    compute_advantages_unified(ended, "gae", lamda=1.0)
    compute_advantages_unified(cut, "gae", lamda=1.0)
    mask = ended[0]["action_mask"].bool()
    torch.testing.assert_close((cut[0]["advantages"] - ended[0]["advantages"])[mask], torch.full((3,), 2.0))
    wanted = (ended[0]["rewards"].sum() - ended[0]["values"][1]).item()
    assert ended[0]["advantages"][1].item() == pytest.approx(wanted, abs=1e-6)


def test_reinforce_compares_with_the_other_answers_to_the_prompt() -> None:
    rewards = [1.0, 0.0, 3.0, 1.0]
    data = [{"rewards": torch.tensor([0.0, r]), "action_mask": torch.tensor([0, 1])} for r in rewards]
    compute_advantages_unified(data, "reinforce", responses_per_prompt=2)
    assert [one["advantages"].tolist() for one in data] == [[0.0, 0.5], [0.0, -0.5], [0.0, 1.0], [0.0, -1.0]]
    compute_advantages_unified(data, "reinforce")
    assert [one["advantages"][1].item() for one in data] == [-0.25, -1.25, 1.75, -0.25]
    compute_advantages_unified(data, "reinforce", responses_per_prompt=2, norm_var=True)
    assert data[2]["advantages"][1].item() == pytest.approx(1 / math.sqrt(2), rel=1e-4)
    compute_advantages_unified(data, "zero")
    assert not any(one["advantages"].any() for one in data)


def test_what_is_missing_or_misspelt_is_said() -> None:
    with pytest.raises(NovaError, match="did you mean vtrace"):
        compute_advantages_unified(trajectories(), "v-trace")
    with pytest.raises(NovaError, match="vtrace has no setting 'clip_ratio'"):
        compute_advantages_unified(trajectories(), "vtrace", clip_ratio=0.2)
    wrong = trajectories()
    for one in wrong:
        one["ref_logps"] = one.pop("behavior_logps")
    with pytest.raises(NovaError, match="ref_logps are of another policy"):
        compute_advantages_unified(wrong, "vtrace")
