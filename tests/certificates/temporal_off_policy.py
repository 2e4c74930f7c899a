"""Certificates of V-trace, Retrace and clipped importance sampling on answers of a behaviour policy mu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.certificates import temporal_exact as tree
from tests.certificates.certificate import CAP, LONG, Certificate
from tests.certificates.temporal_claims import (
    EPISODE,
    FAR,
    GAMMA,
    SAMPLER,
    TARGET,
    added,
    grad_j,
    gradient,
    returns,
    true_values,
)
from tests.certificates.temporal_exact import Numbers

CAPPED: dict[str, Any] = {"lam": 0.5, "rho_max": CAP, "c_max": 0.9}


def off_policy() -> list[Certificate]:
    return [*vtrace(), *retrace(), *importance()]


def visited(weight: Callable[[], Numbers], values: Callable[[], Numbers], of: Callable[[], Numbers]) -> Tensor:
    """sum_s d_mu(s) sum_a mu(a|s) weight (Q(s, a) - V(s)) grad log pi: V is subtracted, `of` gives Q's next states."""
    delta = {
        move: reward + tree.following(EPISODE, of(), move) - values()[move[:-1]]
        for move, reward in EPISODE.reward.items()
    }
    return tree.gradient(EPISODE, {move: weight()[move] * delta[move] for move in delta}, LONG.behavior)


def vtrace() -> list[Certificate]:
    ratio = tree.ratios(EPISODE)

    def fixed_point(cap: float = CAP) -> Numbers:
        return tree.state_values(EPISODE, tree.truncated(TARGET, SAMPLER, cap), 1.0)

    def bounded(options: dict[str, Any]) -> tuple[float, float, float, float]:
        return GAMMA, options["lam"], options["rho_max"], options["c_max"]

    far = "vtrace", {"lam": 0.5, "rho_max": FAR, "c_max": FAR, "pg_rho_max": FAR}
    free = "vtrace", {**CAPPED, "gamma": GAMMA, "pg_rho_max": 1.05}
    return [
        returns(
            "vtrace off policy: returns, no cap",
            "V_pi(s) is their fixed point",
            far,
            true_values,
            true_values,
            behind=True,
        ),
        returns(
            "vtrace off policy: returns, rho_max 1.1",
            "V of the policy ~ min(1.1 mu, pi) is their fixed point",
            ("vtrace", CAPPED),
            fixed_point,
            fixed_point,
            behind=True,
        ),
        returns(
            "vtrace off policy: returns, wrong values",
            "V(s) + E_mu[v_t - V(s)], by recursion",
            free,
            lambda: EPISODE.guess,
            lambda: added(
                EPISODE.guess,
                tree.per_state(EPISODE, SAMPLER, tree.vtrace_errors(EPISODE, EPISODE.guess, *bounded(CAPPED))),
            ),
            behind=True,
        ),
        gradient(
            "vtrace off policy: no cap",
            "sum_s d_mu(s) sum_a pi(a) A_pi(s, a) grad log pi(a)",
            far,
            true_values,
            lambda: visited(lambda: ratio, true_values, true_values),
            behind=True,
        ),
        gradient(
            "vtrace off policy: at its fixed point",
            "sum_s d_mu(s) sum_a min(mu, pi)(a) (Q - V)(s, a) grad log pi(a), V the fixed point",
            ("vtrace", CAPPED),
            fixed_point,
            lambda: visited(lambda: {m: min(1.0, r) for m, r in ratio.items()}, fixed_point, fixed_point),
            behind=True,
        ),
        gradient(
            "vtrace off policy: wrong values",
            "E_mu[sum_t min(1.05, rho) (delta + 0.9 lam E[v - V]) grad log pi(y_t)], by recursion",
            free,
            lambda: EPISODE.guess,
            lambda: tree.gradient(
                EPISODE, tree.vtrace_advantage(EPISODE, EPISODE.guess, *bounded(CAPPED), 1.05), LONG.behavior
            ),
            behind=True,
        ),
    ]


def retrace() -> list[Certificate]:
    return [
        gradient(
            "retrace off policy: no cap",
            "sum_s d_mu(s) sum_a pi(a) A_pi(s, a) grad log pi(a)",
            ("retrace", {"lam": 0.5, "c_max": FAR}),
            true_values,
            lambda: visited(lambda: tree.ratios(EPISODE), true_values, true_values),
            behind=True,
            weigh=True,
        ),
        gradient(
            "retrace off policy: wrong values",
            "E_mu[sum_t rho (delta + 0.9 lam E[min(1, rho') A']) grad log pi(y_t)], by recursion",
            ("retrace", {"lam": 0.5, "gamma": GAMMA}),
            lambda: EPISODE.guess,
            lambda: tree.gradient(
                EPISODE, tree.retrace_advantage(EPISODE, EPISODE.guess, GAMMA, 0.5, 1.0), LONG.behavior
            ),
            behind=True,
            weigh=True,
        ),
    ]


def importance() -> list[Certificate]:
    low, high = 0.9, CAP

    def case(
        name: str, claim: str, options: dict[str, Any], right: Callable[[], Tensor], *, level: str = "decision"
    ) -> Certificate:
        variant = "clipped_is", {"level": level, **options}
        return gradient(
            f"clipped_is off policy, {level}: {name}", claim, variant, lambda: EPISODE.guess, right, behind=True
        )

    def clipped_decision() -> Numbers:
        total, ratio = tree.decision_returns(EPISODE, GAMMA, low, high), tree.ratios(EPISODE)
        return {m: g - min(max(ratio[m], low), high) * EPISODE.guess[m[:-1]] for m, g in total.items()}

    clip: dict[str, Any] = {"rho_min": low, "rho_max": high, "gamma": GAMMA}
    return [
        case(
            "wrong values, no clip",
            "sum_s d_mu(s) sum_a pi(a) Q_pi(s, a) grad log pi(a)",
            {"rho_max": FAR},
            lambda: visited(lambda: tree.ratios(EPISODE), lambda: EPISODE.guess, true_values),
        ),
        case(
            "wrong values",
            "E_mu[sum_t w_t (r_t + 0.9 G_{t+1} - V(s_t)) grad log pi(y_t)], by recursion",
            clip,
            lambda: tree.gradient(EPISODE, clipped_decision(), LONG.behavior),
        ),
        case("wrong values, no clip", "grad J", {"rho_max": FAR}, grad_j, level="trajectory"),
        case(
            "wrong values",
            "sum_y mu(y) clip(pi(y)/mu(y)) sum_t (G_t - V(s_t)) grad log pi(y_t)",
            clip,
            lambda: tree.gradient(
                EPISODE, tree.trajectory_advantage(EPISODE, EPISODE.guess, GAMMA, low, high), LONG.behavior
            ),
            level="trajectory",
        ),
        returns(
            "clipped_is off policy: returns, no clip",
            "V_pi(s), whatever the values",
            ("clipped_is", {"rho_max": FAR}),
            lambda: EPISODE.guess,
            true_values,
            behind=True,
        ),
        returns(
            "clipped_is off policy: returns, clipped",
            "E_mu[w_t (r_t + 0.9 G_{t+1})], by recursion",
            ("clipped_is", clip),
            lambda: EPISODE.guess,
            lambda: tree.per_state(EPISODE, SAMPLER, tree.decision_returns(EPISODE, GAMMA, low, high)),
            behind=True,
        ),
        returns(
            "clipped_is off policy, trajectory: returns, no clip, exact values",
            "V_pi(s) is their fixed point",
            ("clipped_is", {"rho_max": FAR, "level": "trajectory"}),
            true_values,
            true_values,
            behind=True,
        ),
    ]
