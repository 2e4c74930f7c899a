"""Certificates of several objectives: weights on advantages ascend the scalarised expectations, and their faults."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from novarl.algos import advantages
from novarl.control import objectives
from novarl.control.objectives import Method, Objective, Objectives
from tests.certificates import objective_exact as right
from tests.certificates.certificate import MIDDLE, Certificate, certify
from tests.certificates.expected import Minibatch
from tests.certificates.fault import Fault, instead, planted, scaled, shifted, swapped, with_options
from tests.certificates.losses import answer_sum, policy_loss

MU, RHO = 0.4, 0.3
EARLIER = torch.tensor([0.9, 1.1, 2.0], dtype=torch.float64)
"""The means of an earlier step: of the first two objectives better than now, of the third worse."""
METHODS: tuple[Method, ...] = ("weighted_sum", "tchebycheff", "augmented_tchebycheff", "smooth_tchebycheff")


def observed(method: Method) -> list[float]:
    """The weights of raw values when the exact means and deviations have been observed, after the earlier ones."""
    declared = [
        Objective(name, "max" if up else "min", weight)
        for name, up, weight in zip(("reward", "length", "risk"), right.MORE_IS_BETTER, right.WEIGHTS, strict=True)
    ]
    state = Objectives(declared, method, mu=MU, rho=RHO, beta=0.0)
    spread = right.deviations(MIDDLE).tolist()
    state.observe(EARLIER.tolist(), spread)
    return state.observe(right.means(MIDDLE).tolist(), spread)


def measured(batch: Minibatch) -> Tensor:
    """Each answer's reward, length and squared reward [3, k]."""
    return torch.stack([batch.reward, answer_sum(batch, torch.ones_like(batch.logp)), batch.reward.square()])


def of_advantages(method: Method, batch: Minibatch) -> Tensor:
    """Each objective's own leave-one-out advantage, combined."""
    own = torch.stack([advantages.leave_one_out(row, batch.group) for row in measured(batch)])
    return objectives.combine(own, own.new_tensor(observed(method)))


def of_rewards(method: Method, batch: Minibatch) -> Tensor:
    """The leave-one-out advantage of the weighted rewards."""
    table = measured(batch)
    return advantages.leave_one_out(table.new_tensor(observed(method)) @ table, batch.group)


def scores(method: Method) -> Tensor:
    """S by the library, of the exact means."""
    per = 1 / right.deviations(MIDDLE)
    directions = ["max" if up else "min" for up in right.MORE_IS_BETTER]
    now, earlier = (objectives.maximised(v.detach(), directions) * per for v in (right.means(MIDDLE), EARLIER))
    weights = torch.tensor(right.WEIGHTS, dtype=torch.float64)
    return objectives.score(now, objectives.ideal_point(earlier, now), weights, method=method, mu=MU, rho=RHO)


def certificates() -> list[Certificate]:
    claims = {
        "weighted_sum": "grad sum_i w_i J_i",
        "tchebycheff": "-grad max_i w_i (z_i - J_i)",
        "augmented_tchebycheff": "-grad (max_i u_i + rho sum_i u_i), u_i = w_i (z_i - J_i)",
        "smooth_tchebycheff": "-grad mu log sum_i exp(w_i (z_i - J_i) / mu)",
    }
    cases = []
    for method in METHODS:
        exact = partial(right.gradient, MIDDLE, EARLIER, method, mu=MU, rho=RHO)
        value = partial(right.scalarised, MIDDLE, EARLIER, method, mu=MU, rho=RHO)
        claim = f"{claims[method]}, J and z in deviations"
        cases += [
            certify(f"{method} of advantages", claim, MIDDLE, 2, policy_loss(partial(of_advantages, method)), exact),
            certify(f"{method} of rewards", claim, MIDDLE, 2, policy_loss(partial(of_rewards, method)), exact),
            Certificate(f"{method} score", claim.replace("grad ", ""), partial(scores, method), value),
        ]
    return cases


def weights_outside(estimates: Tensor, ideal: Tensor, weights: Tensor, *, mu: float) -> Tensor:
    return weights * ((ideal - estimates) / mu).softmax(-1)


def best_off(estimates: Tensor, ideal: Tensor, weights: Tensor) -> Tensor:
    regret = weights * (ideal - estimates)
    return weights * (regret == regret.min())


FAULTS: list[Fault] = [
    *planted(
        objectives,
        "maximised",
        ("sign of a direction", instead(lambda values, directions: values), "weighted_sum of advantages"),
        ("sign of a direction", instead(lambda values, directions: values), "smooth_tchebycheff of rewards"),
        ("sign of a direction", instead(lambda values, directions: values), "tchebycheff score"),
        ("all turned round", scaled(-1.0), "tchebycheff of advantages"),
    ),
    *planted(
        objectives,
        "ideal_point",
        ("the archive's minimum", instead(torch.minimum), "smooth_tchebycheff of advantages"),
        ("the archive's minimum", instead(torch.minimum), "tchebycheff score"),
        ("the first step's", instead(lambda ideal, estimates: ideal), "smooth_tchebycheff of advantages"),
    ),
    *planted(objectives, "weighted_sum", ("weights one late", shifted(2), "weighted_sum of rewards")),
    *planted(
        objectives,
        "tchebycheff",
        ("weights one late", shifted(2), "tchebycheff of advantages"),
        ("the best off", instead(best_off), "tchebycheff of advantages"),
        ("the best off", swapped(0, 1), "augmented_tchebycheff of rewards"),
    ),
    *planted(
        objectives,
        "augmented_tchebycheff",
        ("rho ignored", with_options(rho=0.0), "augmented_tchebycheff of advantages"),
        ("the best off", swapped(0, 1), "augmented_tchebycheff of advantages"),
    ),
    *planted(
        objectives,
        "smooth_tchebycheff",
        ("weights outside the softmax", instead(weights_outside), "smooth_tchebycheff of advantages"),
        ("sign of the regret", swapped(0, 1), "smooth_tchebycheff of advantages"),
        ("weights one late", shifted(2), "smooth_tchebycheff of advantages"),
        ("mu ignored", with_options(mu=1.0), "smooth_tchebycheff of rewards"),
    ),
    *planted(
        objectives,
        "score",
        ("to be minimised", scaled(-1.0), "weighted_sum score"),
        ("sign of the regret", swapped(0, 1), "smooth_tchebycheff score"),
        ("rho ignored", with_options(rho=0.0), "augmented_tchebycheff score"),
        ("weights one late", shifted(2), "tchebycheff score"),
    ),
    *planted(
        objectives,
        "combine",
        ("sign", scaled(-1.0), "weighted_sum of advantages"),
        ("weights one late", shifted(1), "smooth_tchebycheff of advantages"),
        ("advantages of the next objective", shifted(0), "smooth_tchebycheff of advantages"),
    ),
]
