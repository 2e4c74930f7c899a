"""Certificates of credit over time: policy gradients and values of every estimator.

With exact values every estimator must give the exact gradient. With wrong values, or clipped ratios, it must give
exactly the bias that its formula has, which is what shows where an index or a bootstrap is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.certificates import temporal_exact as tree
from tests.certificates.certificate import LONG, Certificate
from tests.certificates.temporal_claims import (
    EPISODE,
    GAMMA,
    TARGET,
    Variant,
    added,
    grad_j,
    gradient,
    returns,
    true_values,
)
from tests.certificates.temporal_exact import Numbers

ALL: dict[str, Variant] = {
    "gae": ("gae", {"lam": 0.5}),
    "monte_carlo": ("monte_carlo", {}),
    "td_lambda": ("td_lambda", {"lam": 0.5}),
    "n_step, n=2": ("n_step", {"n": 2}),
    "vtrace": ("vtrace", {"lam": 0.5}),
    "retrace": ("retrace", {"lam": 0.5}),
    "clipped_is": ("clipped_is", {}),
    "clipped_is, trajectory": ("clipped_is", {"level": "trajectory"}),
    "segment_gae": ("segment_gae", {"lam": 0.5}),
    "segment_gae, VinePPO": ("segment_gae", {"lam": 0.0}),
}


def on_policy() -> list[Certificate]:
    whole = [gradient(f"{name}: exact values", "grad J", ALL[name], true_values, grad_j) for name in ALL]
    targets = [
        returns(f"{name}: returns, exact values", "V_pi(s)", ALL[name], true_values, true_values)
        for name in ALL
        if not name.startswith("segment")
    ]

    def wrong(name: str, claim: str, options: dict[str, Any], by_move: Callable[[], Numbers]) -> list[Certificate]:
        function = name.split(",")[0]
        variant = function, {**options, "gamma": GAMMA}
        return [
            gradient(
                f"{name}: wrong values, gamma 0.9",
                f"E[sum_t {claim} grad log pi(y_t)]",
                variant,
                lambda: EPISODE.guess,
                lambda: tree.gradient(EPISODE, by_move(), LONG.policy),
            ),
            returns(
                f"{name}: returns, wrong values",
                f"V(s) + E[{claim}]",
                variant,
                lambda: EPISODE.guess,
                lambda: added(EPISODE.guess, tree.per_state(EPISODE, TARGET, by_move())),
            ),
        ]

    def at(lam: float) -> Callable[[], Numbers]:
        return lambda: tree.lambda_advantage(EPISODE, EPISODE.guess, GAMMA, lam)

    sum_of_deltas = "sum_l (0.9 lam)^l delta_{t+l}"
    unbiased = [
        gradient(f"{name}: wrong values", "grad J", variant, lambda: EPISODE.guess, grad_j)
        for name, variant in {
            "gae, lam=1": ("gae", {"lam": 1.0}),
            "monte_carlo": ("monte_carlo", {}),
            "n_step, n=3": ("n_step", {"n": 3}),
            "segment_gae, lam=1": ("segment_gae", {"lam": 1.0}),
        }.items()
    ]
    vine = gradient(
        "segment_gae, VinePPO: wrong values",
        "E[sum_i (r_i + V(s_{i+1}) - V(s_i)) grad log pi(tokens of step i)]",
        ALL["segment_gae, VinePPO"],
        lambda: EPISODE.guess,
        lambda: tree.gradient(EPISODE, tree.segment_advantage(EPISODE, EPISODE.guess), LONG.policy),
    )
    return [
        *whole,
        *targets,
        vine,
        *unbiased,
        *[
            case
            for name in ("gae", "td_lambda", "vtrace", "retrace")
            for case in wrong(name, sum_of_deltas, {"lam": 0.5}, at(0.5))
        ],
        *wrong("monte_carlo", "(G_t - V(s_t))", {}, at(1.0)),
        *wrong(
            "n_step, n=2",
            "(r_t + 0.9 r_{t+1} + 0.81 V(s_{t+2}) - V(s_t))",
            {"n": 2},
            lambda: tree.n_step_advantage(EPISODE, EPISODE.guess, GAMMA, 2),
        ),
    ]
