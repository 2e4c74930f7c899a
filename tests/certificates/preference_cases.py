"""Certificates of losses on preferences and labels: their gradients, and what each has its optimum at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from novarl.algos import preference_losses as preference, reward_modeling
from tests.certificates import exact, preference_exact as right
from tests.certificates.certificate import LONG, MIDDLE, Certificate
from tests.certificates.expected import pack, token_logp
from tests.certificates.world import Policy, World

BETA, WRONG, PENALTY, GAMMA, POINT, GOOD, BAD = 0.7, 0.1, 3.0, 0.4, 0.3, 1.3, 0.8
Columns = tuple[Tensor, Tensor, Tensor, Tensor]


def token_table(world: World, policy: Policy) -> Tensor:
    """log pi(y_t | y_<t) by the library [Y, longest], 0 past the end."""
    packed = pack(world)
    logp, _ = token_logp(packed, policy)
    rows = [logp[torch.tensor(span)][packed.mask[torch.tensor(span)]] for span in packed.spans]
    return torch.stack([torch.cat([row, row.new_zeros(world.longest - len(row))]) for row in rows])


def answers(world: World) -> tuple[Tensor, Tensor]:
    """(log pi(y), log ref(y)) [Y], the first one differentiable."""
    return token_table(world, world.policy).sum(1), token_table(world, world.reference).sum(1).detach()


def every_pair(logp: Tensor, ref: Tensor) -> Columns:
    """The four columns of all ordered pairs, [Y * Y]."""
    one, other = torch.cartesian_prod(torch.arange(len(logp)), torch.arange(len(logp))).unbind(1)
    return logp[one], logp[other], ref[one], ref[other]


def lengths(world: World) -> dict[str, Tensor]:
    chosen, rejected, *_ = every_pair(world.lengths, world.lengths)
    return {"chosen_length": chosen, "rejected_length": rejected}


def direction(world: World, value: Tensor) -> Tensor:
    """Minus the gradient of a loss, one flat vector."""
    return -torch.cat([part.flatten() for part in torch.autograd.grad(value, world.policy.parameters)])


def least(loss: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Where a smooth convex loss of a table [size] is least, by Newton's method; of several such places the nearest."""
    at = torch.zeros(size, dtype=torch.float64)
    for _ in range(30):
        here = at.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(here), here)
        at = at - torch.linalg.pinv(torch.autograd.functional.hessian(loss, at)) @ gradient
    return at


def on_pairs(name: str, claim: str, loss: str, exactly: Any, *, world: World = LONG, **options: Any) -> Certificate:
    """The gradient of a paired loss over the population of pairs."""

    def library() -> Tensor:
        columns = every_pair(*answers(world))
        per_pair = getattr(preference, loss)(*columns, beta=BETA, **options)
        return direction(world, (right.pair_mass(world).flatten() * per_pair).sum())

    return Certificate(name, claim, library, lambda: right.descent(world, exactly, right.pair_mass(world)))


def paired() -> list[Certificate]:
    desirable, undesirable = right.kto(BETA, POINT, GOOD, BAD)
    weights = {"desirable_weight": GOOD, "undesirable_weight": BAD}
    flipped = right.pair_mass(LONG) * (1 - WRONG) + right.pair_mass(LONG).T * WRONG

    def robust() -> Tensor:
        columns = every_pair(*answers(LONG))
        return direction(
            LONG, (flipped.flatten() * preference.robust(*columns, beta=BETA, label_smoothing=WRONG)).sum()
        )

    odds = "s = (pi/ref)^beta"
    return [
        on_pairs("sigmoid", f"-grad E[-log s_w/(s_w + s_l)], {odds}", "sigmoid", right.sigmoid(BETA)),
        on_pairs(
            "sigmoid, label smoothing 0.1",
            "-grad E[-0.9 log s_w/(s_w + s_l) - 0.1 log s_l/(s_w + s_l)]",
            "sigmoid",
            right.sigmoid(BETA, WRONG),
            label_smoothing=WRONG,
        ),
        Certificate(
            "robust, a tenth of the labels flipped",
            "as sigmoid, no label flipped",
            robust,
            lambda: right.descent(LONG, right.sigmoid(BETA), right.pair_mass(LONG)),
        ),
        on_pairs(
            "ipo",
            "-grad E[(log (pi_w ref_l)/(ref_w pi_l) - 1/(2 beta))^2]",
            "ipo",
            right.ipo(BETA, torch.ones_like(LONG.lengths)),
        ),
        on_pairs("ipo, per token", "the same of (pi/ref)^(1/L)", "ipo", right.ipo(BETA, LONG.lengths), **lengths(LONG)),
        on_pairs(
            "dpop",
            "sigmoid with s_w min(1, pi_w/ref_w)^(beta penalty)",
            "dpop",
            right.dpop(BETA, PENALTY, WRONG),
            penalty=PENALTY,
            label_smoothing=WRONG,
        ),
        on_pairs("hinge", "-grad E[max(0, 1 - log s_w/s_l)]", "hinge", right.hinge(BETA)),
        on_pairs(
            "simpo",
            "-grad E[-log s_w/(s_w + e^gamma s_l)], s = pi^(beta/L), smoothed",
            "simpo",
            right.simpo(BETA, GAMMA, LONG.lengths, WRONG),
            gamma=GAMMA,
            label_smoothing=WRONG,
            **lengths(LONG),
        ),
        on_pairs(
            "orpo",
            "-grad E[-log p_w - beta log o_w/(o_w + o_l)], p = pi^(1/L), o = p/(1 - p)",
            "orpo",
            right.orpo(BETA, LONG.lengths),
            **lengths(LONG),
        ),
        on_pairs(
            "kto, paired",
            "-grad E[w_d (1 - v_w) + w_u v_l]/2, v = o/(1 + o), o = (pi/(ref e^kl))^beta",
            "kto",
            lambda p, q: (desirable(p, q)[:, None] + undesirable(p, q)) / 2,
            kl=POINT,
            **weights,
        ),
    ]


def on_labels(name: str, claim: str, function: Callable[..., Tensor], exactly: Any) -> Certificate:
    """The gradient of a loss of answers with labels, over the population of answers."""

    def library() -> Tensor:
        logp, ref = answers(LONG)
        share = right.goodness(LONG)
        one, none = torch.ones_like(share), torch.zeros_like(share)
        per_answer = share * function(logp, ref, one) + (1 - share) * function(logp, ref, none)
        return direction(LONG, (right.answer_mass(LONG) * per_answer).sum())

    return Certificate(
        name, claim, library, lambda: right.descent(LONG, right.labelled(LONG, exactly), right.answer_mass(LONG))
    )


def labelled() -> list[Certificate]:
    weights = {"desirable_weight": GOOD, "undesirable_weight": BAD}
    values = right.kto(BETA, POINT, GOOD, BAD)
    claim = "-grad E[w_d (1 - v) if good, w_u v if bad]"
    point = torch.tensor(POINT)

    def mean_ratio() -> Tensor:
        return (exact.fixed(LONG, LONG.reference) / exact.fixed(LONG, LONG.policy)).log().mean()[None]

    return [
        on_labels(
            "kto_unpaired",
            claim,
            lambda logp, ref, label: preference.kto_unpaired(logp, ref, label, POINT, beta=BETA, **weights),
            values,
        ),
        on_labels(
            "implicit_kto",
            claim,
            lambda logp, ref, label: reward_modeling.implicit_kto(logp, ref, label, point, beta=BETA, **weights),
            right.kto(BETA, float(point), GOOD, BAD),
        ),
        on_labels(
            "implicit_ce",
            "-grad E[cross-entropy of the label], P(good) = s/(1 + s), s = (pi/ref)^beta",
            lambda logp, ref, label: reward_modeling.implicit_ce(logp, ref, label, beta=BETA),
            right.cross_entropy(BETA),
        ),
        Certificate(
            "kto_point, policies exchanged",
            "mean log ref/pi over all answers, which is above 0",
            lambda: preference.kto_point(*reversed(answers(LONG)))[None],
            mean_ratio,
        ),
    ]


def optima() -> list[Certificate]:
    """What each loss is least at, where every answer has a parameter of its own."""
    world, mass = MIDDLE, right.pair_mass(MIDDLE).flatten()
    size, ref = len(world.answers), exact.fixed(world, world.reference).log()
    share, answered = right.goodness(world), right.answer_mass(world)

    def policy(loss: str) -> Tensor:
        """The distribution at the optimum of a paired loss."""
        function = getattr(preference, loss)
        found = least(lambda theta: (mass * function(*every_pair(theta.log_softmax(0), ref), beta=BETA)).sum(), size)
        return found.softmax(0)

    def rewards(reward: Tensor) -> Tensor:
        chosen, rejected, *_ = every_pair(reward, reward)
        return (mass * reward_modeling.bt(chosen, rejected)).sum()

    def labels(reward: Tensor) -> Tensor:
        return (answered * reward_modeling.bce(reward, share)).sum()

    def implicit() -> Tensor:
        """The optimum of implicit_dpo, as a policy."""

        def loss(theta: Tensor) -> Tensor:
            columns = every_pair(theta.log_softmax(0), ref)
            return (mass * reward_modeling.implicit_dpo(*columns, beta=BETA)).sum()

        return least(loss, size).softmax(0)

    best = "ref e^(r/beta)/Z: the optimum of E[r] - beta KL(pi, ref)"
    return [
        Certificate("optimum of sigmoid", best, lambda: policy("sigmoid"), lambda: right.rewarded(world, BETA)),
        Certificate("optimum of implicit_dpo", best, implicit, lambda: right.rewarded(world, BETA)),
        Certificate(
            "optimum of ipo",
            "ref e^(P(y wins)/beta)/Z",
            lambda: policy("ipo"),
            lambda: right.psi_optimum(world, BETA),
        ),
        Certificate(
            "optimum of bt",
            "the probabilities of every preference",
            lambda: right.against(least(rewards, size).exp()).flatten(),
            lambda: right.preference(world).flatten(),
        ),
        Certificate(
            "optimum of bce",
            "the probabilities of every label",
            lambda: least(labels, size).sigmoid(),
            lambda: share,
        ),
    ]
