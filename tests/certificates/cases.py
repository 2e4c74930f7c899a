"""The certificates: what the library's gradient is in expectation, and what it should be.

Each compares two vectors (or two numbers) that were computed in different ways; they must agree to 1e-8 in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.certificates import (
    constraint_cases,
    credit_cases,
    loss_cases,
    objective_cases,
    preference_cases,
    reward_cases,
    rows_cases,
    surrogate_cases,
    temporal_cases,
    temporal_groups,
    temporal_off_policy,
    truncation_cases,
)
from tests.certificates.certificate import Certificate


@dataclass(frozen=True, slots=True)
class Part:
    """Certificates of one subject, and what a reader must know to read their claims."""

    title: str
    about: str
    cases: tuple[Certificate, ...]


PARTS = (
    Part(
        "Algorithms",
        "Every row of the table in `novarl/algos/named.py`, its credit and its loss put together as `novarl rl` does, "
        "at the first update of a rollout, with rewards 0 or 1 and groups of three (reinforce_pp: two of two). A is "
        "the reward less its group's mean, over the group's deviation; r_t a token's process reward and m the mean "
        "over an answer's tokens; V the value of a state, wrong on purpose unless it says exact values; r_i the reward "
        "of a step of several tokens.",
        tuple(rows_cases.rows()),
    ),
    Part(
        "Baselines, groups and aggregation",
        "Token and sequence aggregation divide by lengths, which no longer gives grad J where length depends on the "
        "answer. In the claims on PRIME, r_t is a token's process reward and m the mean over an answer's tokens.",
        (
            *credit_cases.baselines(),
            *credit_cases.deviations(),
            *temporal_groups.groups(),
            *credit_cases.aggregations(),
        ),
    ),
    Part(
        "Credit over time",
        "Every token has a reward, answers that were cut have a value after their end, and V is exact or wrong, as a "
        "critic's are. r_t is the reward of a token, delta_t = r_t + gamma V(s_{t+1}) - V(s_t), d_mu(s) how often mu "
        "visits a state, rho = pi/mu of a token, Q the value of a state and a token.",
        (*temporal_cases.on_policy(), *temporal_off_policy.off_policy()),
    ),
    Part(
        "Surrogates",
        "r_t = pi(y_t)/pi_old(y_t); at ratio 1 the policy is still the old one, off policy the old one sampled.",
        (
            *loss_cases.surrogates(),
            *surrogate_cases.on_policy(),
            *surrogate_cases.off_policy_surrogates(),
        ),
    ),
    Part(
        "Corrections of the sampler",
        "mu sampled, and the weights are those of pi against it. How much bias each leaves is measured below.",
        (*loss_cases.corrections(), *surrogate_cases.corrections()),
    ),
    Part(
        "Regularizers",
        "x_t = log pi(y_t)/ref(y_t), d(s) how often a state is visited. A regularizer that is a loss does not see what "
        "a token does to the states after it; as a reward it does.",
        (*loss_cases.regularizers(), *surrogate_cases.kl_corrections(), *loss_cases.likeliest()),
    ),
    Part(
        "Truncated sampling",
        "pi_S is the policy renormalised in each state over the tokens that top-k, top-p and min-p leave of it, J_S "
        "its expected reward, ref_S the reference renormalised over the same tokens, d_S(s) how often a state is "
        "visited.",
        tuple(truncation_cases.certificates()),
    ),
    Part(
        "Preferences and labels",
        "w is the preferred answer of a pair and l the other; all pairs, or all answers and labels, with their "
        "probabilities. The optima are those of the library's losses, with a parameter for every answer.",
        (*preference_cases.paired(), *preference_cases.labelled(), *preference_cases.optima()),
    ),
    Part(
        "Reward models",
        "r is a model's reward, m the margin of a pair, l a label; implicit rewards are read off pi and ref.",
        (*reward_cases.rewarding(), *reward_cases.implicit(), *reward_cases.scored()),
    ),
    Part(
        "Several objectives",
        "J_i is the mean of objective i and z_i the best one seen, both turned so that more is better.",
        tuple(objective_cases.certificates()),
    ),
    Part(
        "Constraints",
        "A policy with a few arms that answers a coefficient exactly, against the constrained optimum by bisection; "
        "lambda and nu are the prices of KL and of entropy H, d the limit.",
        tuple(constraint_cases.certificates()),
    ),
)
CERTIFICATES = {case.name: case for part in PARTS for case in part.cases}
