"""Faults of credit over time and of PRIME, OPO, REINFORCE++: what each is, how to plant it, and what must catch it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from novarl.algos import advantages
from novarl.algos.advantages.steps import Steps, accumulate
from tests.certificates.fault import Fault, Function, instead, planted, scaled, with_options

Plant = Callable[[Function], Function]
Inputs = dict[str, Any]


def given(change: Callable[[Inputs], Inputs]) -> Plant:
    """The function is called with some keywords changed."""
    return lambda function: lambda *arguments, **inputs: function(*arguments, **{**inputs, **change(inputs)})


def advantage(change: Callable[[Tensor, Inputs], Tensor]) -> Plant:
    """The first result is changed."""

    def plant(function: Function) -> Function:
        def faulty(**inputs: Any) -> tuple[Tensor, Tensor]:
            first, second = function(**inputs)
            return change(first, inputs), second

        return faulty

    return plant


def returned(change: Callable[[Tensor, Tensor, Inputs], Tensor]) -> Plant:
    """The returns are changed: from advantage, returns and inputs."""

    def plant(function: Function) -> Function:
        def faulty(**inputs: Any) -> tuple[Tensor, Tensor]:
            first, second = function(**inputs)
            return first, change(first, second, inputs)

        return faulty

    return plant


def last_value(inputs: Inputs) -> Inputs:
    """V(s_{T-1}) in place of the value after the last step."""
    columns = torch.arange(inputs["mask"].shape[1])
    last = torch.where(inputs["mask"], columns, 0).amax(1, keepdim=True)
    return {"bootstrap": inputs["values"].gather(1, last)[:, 0]}


def whitened_by_row(result: Tensor, inputs: Inputs) -> Tensor:
    mask = inputs["mask"]
    count = mask.sum(1, keepdim=True)
    mean = result.sum(1, keepdim=True) / count
    spread = (((result - mean) * mask) ** 2).sum(1, keepdim=True) / count
    return (result - mean) * mask / (spread.sqrt() + 1e-8)


def swapped_ratio(inputs: Inputs) -> Inputs:
    return {"logp": inputs["behavior_logp"], "behavior_logp": inputs["logp"]}


def wrong_policy(inputs: Inputs) -> Inputs:
    """The ratio of the sampler to itself, as with the log-probs of another policy in its place."""
    return {"behavior_logp": inputs["logp"]}


def own_trace(**inputs: Any) -> tuple[Tensor, Tensor]:
    """Retrace with c_t in place of c_{t+1}: the step's own delta is weighed too."""
    ratio = (inputs.pop("logp"), inputs.pop("behavior_logp"))
    gamma, lam, c_max = inputs.pop("gamma", 1.0), inputs.pop("lam", 1.0), inputs.pop("c_max", 1.0)
    steps = Steps.of(**inputs)
    trace = lam * steps.ratio(*ratio).clamp(max=c_max)
    result = accumulate(trace * steps.delta(gamma), gamma * trace)
    return steps.spread(result, result + steps.value)


def weighed_return_only(function: Function) -> Function:
    """w G - V in place of w (G - V)."""

    def faulty(**inputs: Any) -> tuple[Tensor, Tensor]:
        result, returns = function(**{**inputs, "values": torch.zeros_like(inputs["values"])})
        return (result - inputs["values"]) * inputs["mask"], returns

    return faulty


MASK_IGNORED = given(lambda inputs: {"mask": torch.ones_like(inputs["mask"])})
GAP_REWARDS_LOST = given(lambda inputs: {"rewards": inputs["rewards"] * inputs["mask"]})
VALUES_EARLY = given(lambda inputs: {"values": inputs["values"].roll(-2, 1)})
SIGN = scaled(-1.0, 0)
NOT_DISCOUNTED = with_options(gamma=1.0)
ONLY_ADVANTAGE = returned(lambda first, _, __: first)


def over_time(function: str, exact: str, wrong: str, returns: str, *more: tuple[str, Plant, str]) -> list[Fault]:
    """The faults that every estimator over time may have."""
    return planted(
        advantages,
        function,
        ("sign", SIGN, exact),
        ("mask ignored", MASK_IGNORED, wrong),
        ("rewards of gaps lost", GAP_REWARDS_LOST, exact),
        ("bootstrap of V(s_{T-1})", given(last_value), exact),
        ("whitened per trajectory", advantage(whitened_by_row), exact),
        ("values one step early", VALUES_EARLY, exact),
        ("discount ignored", NOT_DISCOUNTED, wrong),
        ("returns are advantages", ONLY_ADVANTAGE, returns),
        *more,
    )


def usual(function: str, *more: tuple[str, Plant, str], name: str | None = None) -> list[Fault]:
    name = name or function
    wrong, returns = f"{name}: wrong values, gamma 0.9", f"{name}: returns, wrong values"
    return over_time(function, f"{name}: exact values", wrong, returns, *more)


def prime_late(function: Function) -> Function:
    return lambda tokens, mask, *rest, **options: function(tokens, mask.roll(1, 1), *rest, **options)


def prime_forwards(function: Function) -> Function:
    """Process rewards summed up to the token in place of from it on."""
    return lambda tokens, mask, *rest, **options: function(tokens.flip(1), mask.flip(1), *rest, **options).flip(1)


def prime_own_mean(function: Function) -> Function:
    """The group's mean, the answer's own in it, as the paper's code has it."""

    def faulty(
        tokens: Tensor, mask: Tensor, outcome: Tensor, group: Tensor, *, gamma: float, process_coef: float
    ) -> Any:
        whole = function(tokens, mask, outcome, group, gamma=gamma, process_coef=0.0)
        mean = (tokens * mask).sum(1) / mask.sum(1)
        centred = torch.where(mask, tokens - mean.mean(), 0.0)
        zeros = torch.zeros_like(tokens)
        back, _ = advantages.monte_carlo(rewards=centred, values=zeros, mask=mask, bootstrap=zeros[:, 0], gamma=gamma)
        return whole + process_coef * back

    return faulty


def one_group(function: Function) -> Function:
    return lambda rewards, group, **options: function(rewards, torch.zeros_like(group), **options)


TRAJECTORY = "clipped_is off policy, trajectory: wrong values, no clip"
DECISION = "clipped_is off policy, decision: wrong values, no clip"
OFF = "off policy: wrong values"

FAULTS: list[Fault] = [
    *usual("gae", ("lambda ignored", with_options(lam=1.0), "gae: wrong values, gamma 0.9")),
    *usual("monte_carlo"),
    *usual("td_lambda", ("lambda ignored", with_options(lam=1.0), "td_lambda: wrong values, gamma 0.9")),
    *usual(
        "n_step",
        ("one step more", given(lambda inputs: {"n": inputs["n"] + 1}), "n_step, n=2: wrong values, gamma 0.9"),
        name="n_step, n=2",
    ),
    *usual(
        "vtrace",
        ("mu / pi", given(swapped_ratio), "vtrace off policy: no cap"),
        ("ratio against the wrong policy", given(wrong_policy), "vtrace off policy: no cap"),
        ("rho not truncated", with_options(rho_max=1e9), "vtrace off policy: returns, rho_max 1.1"),
        ("c not truncated", with_options(c_max=1e9), f"vtrace {OFF}"),
        ("weight of the policy gradient not truncated", with_options(pg_rho_max=1e9), f"vtrace {OFF}"),
        (
            "returns from its own advantage",
            returned(lambda a, _, i: a + i["values"]),
            "vtrace off policy: returns, wrong values",
        ),
    ),
    *usual(
        "retrace",
        ("c_t in place of c_{t+1}", instead(own_trace), f"retrace {OFF}"),
        ("mu / pi", given(swapped_ratio), f"retrace {OFF}"),
        ("ratio against the wrong policy", given(wrong_policy), f"retrace {OFF}"),
        ("c not truncated", with_options(c_max=1e9), f"retrace {OFF}"),
    ),
    *over_time(
        "clipped_is",
        "clipped_is, trajectory: exact values",
        "clipped_is off policy, decision: wrong values",
        "clipped_is off policy: returns, no clip",
        ("the return alone weighed", weighed_return_only, "clipped_is off policy, decision: wrong values"),
        ("the return alone weighed", weighed_return_only, "clipped_is off policy, trajectory: wrong values"),
        ("mu / pi", given(swapped_ratio), DECISION),
        ("ratio against the wrong policy", given(wrong_policy), TRAJECTORY),
        ("not clipped above", with_options(rho_max=1e9), "clipped_is off policy: returns, clipped"),
        ("not clipped below", with_options(rho_min=0.0), "clipped_is off policy, trajectory: wrong values"),
        ("level ignored", with_options(level="decision"), TRAJECTORY),
        (
            "returns are the plain ones",
            returned(lambda a, _, i: a + i["values"]),
            "clipped_is off policy: returns, clipped",
        ),
    ),
    *planted(
        advantages,
        "segment_gae",
        ("sign", SIGN, "segment_gae: exact values"),
        ("mask ignored", MASK_IGNORED, "segment_gae: exact values"),
        ("rewards of gaps lost", GAP_REWARDS_LOST, "segment_gae: exact values"),
        ("bootstrap of V(s_{T-1})", given(last_value), "segment_gae: exact values"),
        ("whitened per trajectory", advantage(whitened_by_row), "segment_gae: exact values"),
        ("value of the step's second token", VALUES_EARLY, "segment_gae, VinePPO: wrong values"),
        (
            "boundaries one token late",
            given(lambda inputs: {"segment": inputs["segment"].roll(2, 1)}),
            "segment_gae, VinePPO: wrong values",
        ),
        (
            "every token a step",
            given(lambda inputs: {"segment": torch.arange(inputs["mask"].shape[1]).expand_as(inputs["mask"])}),
            "segment_gae, VinePPO: wrong values",
        ),
        ("lambda ignored", with_options(lam=0.0), "segment_gae, lam=1: wrong values"),
    ),
    *planted(advantages, "remax", ("sign", scaled(-1.0), "remax")),
    *planted(
        advantages,
        "opo",
        ("sign", scaled(-1.0), "opo, k=2"),
        ("lengths ignored", given(lambda i: {"lengths": torch.ones_like(i["lengths"])}), "opo, k=3"),
        ("lengths one late", given(lambda i: {"lengths": i["lengths"].roll(1)}), "opo, k=3"),
        ("squared lengths", given(lambda i: {"lengths": i["lengths"] ** 2}), "opo, its baseline"),
    ),
    *planted(
        advantages,
        "reinforce_pp",
        ("sign", scaled(-1.0), "reinforce_pp, two groups of 2"),
        ("groups ignored", one_group, "reinforce_pp, groups of 2 and 1 interleaved"),
        (
            "deviation of the group",
            lambda _: lambda rewards, group, *, eps: advantages.group(rewards, group, norm_std=True, eps=eps),
            "reinforce_pp, two groups of 2",
        ),
    ),
    *planted(
        advantages,
        "prime",
        ("sign", scaled(-1.0), "prime, k=2"),
        ("mask one late", prime_late, "prime, k=2"),
        ("returns forwards", prime_forwards, "prime, k=2"),
        ("own mean in the baseline", prime_own_mean, "prime, k=2"),
        ("process rewards ignored", with_options(process_coef=0.0), "prime, k=2"),
        ("coefficient ignored", with_options(process_coef=1.0), "prime, k=3, gamma 0.9, process_coef 0.5"),
        ("discount ignored", NOT_DISCOUNTED, "prime, k=3, gamma 0.9, process_coef 0.5"),
        (
            "groups ignored",
            lambda function: (
                lambda tokens, mask, outcome, group, **options: function(
                    tokens, mask, outcome, torch.zeros_like(group), **options
                )
            ),
            "prime, groups of 2 and 1 interleaved",
        ),
    ),
]
