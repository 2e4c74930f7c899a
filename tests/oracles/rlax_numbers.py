"""What rlax computes of the same rows, step by step.

Its functions know neither masks nor gaps: each row is closed up first, and its results put back where the steps were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.oracles.inputs import DISCOUNT, LAMBDA, steps

Row = dict[str, Any]


def rows() -> list[tuple[np.ndarray, Row]]:
    """Each row's columns, and what rlax asks for: v_tm1 values before each step, v_t after, rho the ratios."""
    given, found = steps(), []
    for s, mask in enumerate(given.mask):
        columns = mask.nonzero().flatten()
        value = given.values[s, columns]
        after = torch.cat([value[1:], given.bootstrap[s, None]])
        log_rho = given.logp[s, columns] - given.behavior_logp[s, columns]
        arrays = {
            "v_tm1": value,
            "v_t": after,
            "r_t": given.rewards[s, columns],
            "discount_t": torch.full_like(value, DISCOUNT),
            "rho_tm1": log_rho.exp(),
            "log_rho": log_rho,
        }
        found.append((columns.numpy(), {name: array.numpy() for name, array in arrays.items()}))
    return found


def spread(one: Callable[[Row], dict[str, Any]]) -> dict[str, Any]:
    shape, results = tuple(steps().mask.shape), {}
    for s, (columns, row) in enumerate(rows()):
        for name, value in one(row).items():
            results.setdefault(name, np.zeros(shape))[s, columns] = np.asarray(value)
    return {name: value.tolist() for name, value in results.items()}


def numbers() -> dict[str, dict[str, Any]]:
    import jax

    jax.config.update("jax_enable_x64", True)
    import rlax

    def picked(row: Row, *names: str) -> list[Any]:
        return [row[name] for name in names]

    def returns(found: Any, row: Row) -> dict[str, Any]:
        return {"advantage": found - row["v_tm1"], "returns": found}

    def vtrace(**options: float) -> Callable[[Row], dict[str, Any]]:
        def one(row: Row) -> dict[str, Any]:
            arguments = picked(row, "v_tm1", "v_t", "r_t", "discount_t", "rho_tm1")
            found = rlax.vtrace_td_error_and_advantage(*arguments, **options)
            return {"advantage": found.pg_advantage, "returns": found.errors + row["v_tm1"]}

        return one

    def unclipped(row: Row) -> dict[str, Any]:
        """Leaky V-trace that leaks everything; the only one of rlax's whose traces may exceed 1."""
        arguments = picked(row, "v_tm1", "v_t", "r_t", "discount_t", "rho_tm1")
        found = rlax.leaky_vtrace_td_error_and_advantage(*arguments, alpha=0.0, lambda_=LAMBDA)
        return {"advantage": found.pg_advantage, "returns": found.errors + row["v_tm1"]}

    def gae(row: Row) -> dict[str, Any]:
        values = np.append(row["v_tm1"], row["v_t"][-1])
        found = rlax.truncated_generalized_advantage_estimation(*picked(row, "r_t", "discount_t"), LAMBDA, values)
        return {"advantage": found}

    def n_step(n: int) -> Callable[[Row], dict[str, Any]]:
        return lambda row: returns(rlax.n_step_bootstrapped_returns(*picked(row, "r_t", "discount_t", "v_t"), n=n), row)

    def off_policy(row: Row) -> dict[str, Any]:
        """With Q = V: q(s_t, a_t) of the steps after the first are their values."""
        trace = LAMBDA * np.minimum(1.0, row["rho_tm1"])[1:]
        arguments = (row["v_tm1"][1:], *picked(row, "v_t", "r_t", "discount_t"), trace)
        return returns(rlax.general_off_policy_returns_from_q_and_v(*arguments), row)

    def retrace(row: Row) -> dict[str, Any]:
        arguments = (row["v_tm1"], row["v_tm1"][1:], *picked(row, "v_t", "r_t", "discount_t"))
        return {"advantage": rlax.retrace_continuous(*arguments, row["log_rho"][1:], LAMBDA)}

    def td_lambda(row: Row) -> dict[str, Any]:
        return returns(rlax.lambda_returns(*picked(row, "r_t", "discount_t", "v_t"), lambda_=LAMBDA), row)

    def monte_carlo(row: Row) -> dict[str, Any]:
        return returns(rlax.discounted_returns(*picked(row, "r_t", "discount_t", "v_t")), row)

    asked: dict[str, Callable[[Row], dict[str, Any]]] = {
        "vtrace": vtrace(),
        "vtrace, lam": vtrace(lambda_=LAMBDA),
        "vtrace, clips apart": vtrace(lambda_=LAMBDA, clip_rho_threshold=1.7, clip_pg_rho_threshold=1.3),
        "vtrace, no clips": unclipped,
        "retrace, returns": off_policy,
        "retrace, advantage": retrace,
        "td_lambda": td_lambda,
        "gae": gae,
        "monte_carlo": monte_carlo,
        **{f"n_step, n={n}": n_step(n) for n in (1, 3, 9)},
    }
    return {name: spread(one) for name, one in asked.items()}


def versions() -> dict[str, str]:
    import jax
    import rlax

    return {"rlax": rlax.__version__, "jax": jax.__version__}
