"""Certificates of every row of the table of algorithms, composed as a run composes it, at its first update.

Rewards are 0 or 1. Clips do not act where the policy is still the old one; `surrogate_cases` has them off policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from novarl.algos.named import ALGORITHMS
from novarl.learn.credit import CreditRule, Rows
from novarl.learn.objective import Objective
from tests.certificates import exact, losses, rows_exact, temporal_exact as tree, temporal_group_exact as groups
from tests.certificates.certificate import BINARY, Certificate, grad_j, scored, success_rate
from tests.certificates.expected import ascent
from tests.certificates.fault import Fault, Function, planted, scaled, shifted
from tests.certificates.row_loss import row_loss
from tests.certificates.temporal_exact import Numbers

PAIRS = [3, -1, 3, -1]
"""Two groups of two, interleaved."""
PPO_KL = 0.01
PLAIN = {"adv": {"whiten": False}, "loss": {"agg": "constant"}}
"""Without what makes no expectation simple: whitening, and a mean over the batch's tokens."""
OUTCOME, PENALISED = (rows_exact.outcome_episode(BINARY, beta) for beta in (0.0, PPO_KL))


@dataclass(frozen=True, slots=True)
class Row:
    """What a row's expected update is; over batches of k answers, with these values of states, under these settings."""

    claim: str
    right: Callable[[], Tensor]
    k: int = 3
    groups: Sequence[int] | None = None
    values: Callable[[], Numbers] | None = None
    settings: Mapping[str, Any] | None = None


def standardised(how: str) -> Callable[[], Tensor]:
    """E[A/(what `how` says) grad log pi(y)], A standardised within the group of 3."""
    return scored(BINARY, lambda: exact.group_weights(BINARY, 3, std=True, how=how))


def grpo() -> Tensor:
    pull = (1 - 1 / exact.ratios(BINARY, BINARY.policy, BINARY.reference)) / BINARY.lengths[:, None]
    return exact.group_weights(BINARY, 3, std=True, how="sequence")[:, None] - 0.04 * pull


def dapo() -> Tensor:
    return exact.group_weights(BINARY, 3, std=True, how="token") / exact.mixed_rate(success_rate(), 3)


def reinforce_pp() -> Tensor:
    log_ratio = exact.ratios(BINARY, BINARY.policy, BINARY.reference).log()
    pull = exact.length_mixing(BINARY, 4)[:, None] * log_ratio
    advantages = rows_exact.pairs_over_the_deviation(BINARY)
    return rows_exact.drawn_weights(BINARY, 4, advantages, "token") - 0.01 * pull


def whitened(table: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """E[(A_t - mean)/deviation/(all tokens) grad log pi(y_t)] for a table of advantages."""
    return scored(BINARY, lambda: rows_exact.drawn_weights(BINARY, 3, rows_exact.whitened(BINARY, table()), "token"))


def true_values(episode: tree.Episode) -> Callable[[], Numbers]:
    return lambda: tree.state_values(episode, tree.chances(BINARY, BINARY.policy), 1.0)


GROUPS: dict[str, Row] = {
    "reinforce": Row("grad J", grad_j(BINARY)),
    "rloo": Row("grad J", grad_j(BINARY)),
    "grpo": Row("E[A/L grad log pi(y)] - 0.04 E[(1/L) sum_t grad KL(ref, pi)]", scored(BINARY, grpo)),
    "dr_grpo": Row("(1 - 1/3)/max_tokens grad J", grad_j(BINARY, 2 / 3 / BINARY.longest)),
    "dapo": Row("E[A/(all tokens) grad log pi(y)] / P(rewards not all equal)", scored(BINARY, dapo)),
    "ppo_clip": Row(
        "E[(R - mean)/(all tokens) grad log pi(y)]",
        scored(BINARY, lambda: exact.group_weights(BINARY, 3, std=False, how="token")),
    ),
    "gspo": Row("E[A/L grad log pi(y)]", standardised("sequence")),
    "cispo": Row("E[A/(all tokens) grad log pi(y)]", standardised("token")),
    "reinforce_pp": Row(
        "E[sum_t ((R - R')/2 / deviation of all four - 0.01 log pi/ref(y_t))/(all tokens) grad log pi(y_t)]",
        scored(BINARY, reinforce_pp),
        k=4,
        groups=PAIRS,
    ),
    "remax": Row("grad J", grad_j(BINARY)),
    "opo": Row(
        "E[(R - (L R + L' R' + L'' R'')/(L + L' + L'')) grad log pi(y)]",
        scored(BINARY, lambda: groups.length_weighted(BINARY, 3)),
    ),
    "prime": Row(
        "E[sum_t (R - mean R' + sum_{s>=t} (r_s - mean m'))/(all tokens) grad log pi(y_t)]",
        scored(BINARY, lambda: rows_exact.drawn_weights(BINARY, 3, rows_exact.prime(BINARY), "token")),
    ),
    "prime, loss.agg=constant": Row(
        "grad (E[R] + E[sum_t r_t] - E[m] E[L]), E[m] fixed",
        lambda: exact.objective_gradient(BINARY, groups.prime_objective(BINARY, 1.0)),
        settings={"loss": {"agg": "constant"}},
    ),
}

OVER_TIME: dict[str, Row] = {
    "ppo": Row(
        "E[sum_t (A_t - mean A)/deviation/(all tokens) grad log pi(y_t)], A = GAE(0.95) of R - 0.01 log pi/ref",
        whitened(lambda: rows_exact.answer_gae(PENALISED, PENALISED.guess, 0.95)),
        values=lambda: PENALISED.guess,
    ),
    "ppo, exact values, neither whitened nor divided by tokens": Row(
        "grad (J - 0.01 KL(pi, ref))",
        lambda: exact.kl_regularised_gradient(BINARY, PPO_KL),
        k=1,
        values=true_values(PENALISED),
        settings=PLAIN,
    ),
    "vineppo": Row(
        "E[sum_t (A_t - mean A)/deviation/(all tokens) grad log pi(y_t)], A_t = r_i + V(s_{i+1}) - V(s_i) of its step",
        whitened(lambda: tree.segment_advantage(OUTCOME, OUTCOME.guess)),
        values=lambda: OUTCOME.guess,
    ),
    "vineppo, exact values, neither whitened nor divided by tokens": Row(
        "grad J",
        grad_j(BINARY),
        k=1,
        values=true_values(OUTCOME),
        settings=PLAIN,
    ),
}


def case(name: str, row: Row) -> Certificate:
    algo = name.split(",")[0]
    admitted = losses.varies if ALGORITHMS[algo].dynamic_sampling else None

    def library() -> Tensor:
        values = row.values() if row.values is not None else None
        loss = row_loss(algo, BINARY, settings=row.settings, values=values)
        return ascent(BINARY, row.k, loss, groups=row.groups, admitted=admitted)

    return Certificate(f"algo={name}", row.claim, library, row.right)


def rows() -> list[Certificate]:
    return [case(name, row) for name, row in (GROUPS | OVER_TIME).items()]


def towards_the_reference(function: Function) -> Function:
    """The sign of one regularizer, in the sum of losses."""
    return lambda self, name: -function(self, name) if name == "kl" else function(self, name)


FAULTS: list[Fault] = [
    *planted(
        CreditRule,
        "_kl",
        ("sign", scaled(-1.0), "algo=ppo"),
        ("tokens one late", lambda function: lambda self, scores: function(self, scores).roll(1), "algo=ppo"),
    ),
    *planted(
        CreditRule,
        "_temporal",
        ("sign", lambda function: lambda *given: tuple(-part for part in function(*given)), "algo=vineppo"),
        ("returns for advantages", lambda function: lambda *given: function(*given)[::-1], "algo=ppo"),
    ),
    *planted(
        Rows, "spread", ("tokens one late", shifted(1), "algo=prime"), ("tokens one late", shifted(1), "algo=vineppo")
    ),
    *planted(Rows, "flat", ("steps one late", shifted(1, axis=1), "algo=ppo")),
    *planted(Objective, "coefficient", ("sign of the regularizer", towards_the_reference, "algo=grpo")),
]
"""Of what a run makes of a row; those of the functions themselves are planted elsewhere."""
