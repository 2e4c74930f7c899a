"""Certificates of reward models: options of their losses, implicit rewards of steps, and measures of calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from novarl.algos import calibration, implicit_prm, preference_losses as preference, reward_modeling
from tests.certificates import exact, preference_exact as right
from tests.certificates.certificate import LONG, MIDDLE, Certificate
from tests.certificates.preference_cases import BETA, WRONG, answers, every_pair, token_table

CENTRING = 0.05


def rewarding() -> list[Certificate]:
    """The gradient of `bt` with each of its options, in the rewards themselves."""
    world, mass = MIDDLE, right.pair_mass(MIDDLE)
    reward = 1.5 * world.reward + 0.4
    demanded = (world.lengths[:, None] - 0.5 * world.lengths).abs()

    def case(name: str, claim: str, *, margin: bool = False, centring: float = 0.0, wrong: float = 0.0) -> Certificate:
        def library() -> Tensor:
            at = reward.clone().requires_grad_()
            chosen, rejected, *_ = every_pair(at, at)
            losses = reward_modeling.bt(
                chosen,
                rejected,
                margin=demanded.flatten() if margin else None,
                centring=centring,
                label_smoothing=wrong,
            )
            return torch.autograd.grad((mass.flatten() * losses).sum(), at)[0]

        def exactly() -> Tensor:
            difference, m = reward[:, None] - reward, demanded if margin else 0.0
            push = mass * ((1 - wrong) / (1 + (difference - m).exp()) - wrong / (1 + (-difference - m).exp()))
            level = mass * (reward[:, None] + reward)
            return push.sum(0) - push.sum(1) + 2 * centring * (level.sum(0) + level.sum(1))

        return Certificate(name, claim, library, exactly)

    plain = "grad E[log(1 + e^(r_l - r_w))"
    return [
        case("bt, margins", "grad E[log(1 + e^(m + r_l - r_w))]", margin=True),
        case("bt, centring 0.05", f"{plain} + 0.05 (r_w + r_l)^2]", centring=CENTRING),
        case(
            "bt, margins, label smoothing 0.1",
            "grad E[0.9 log(1 + e^(m + r_l - r_w)) + 0.1 log(1 + e^(m + r_w - r_l))]",
            margin=True,
            wrong=WRONG,
        ),
        smoothed_labels(),
    ]


def smoothed_labels() -> Certificate:
    """The gradient of `bce` in the rewards, with smoothing: the probability minus the smoothed label."""
    reward, share = 1.5 * MIDDLE.reward + 0.4, right.goodness(MIDDLE)

    def library() -> Tensor:
        at = reward.clone().requires_grad_()
        return torch.autograd.grad(reward_modeling.bce(at, share, label_smoothing=WRONG).sum(), at)[0]

    def exactly() -> Tensor:
        return 1 / (1 + (-reward).exp()) - (share * (1 - WRONG) + (1 - share) * WRONG)

    return Certificate("bce, label smoothing 0.1", "sigma(r) - 0.9 l - 0.1 (1 - l)", library, exactly)


def implicit() -> list[Certificate]:
    """Rewards read off a pair of policies."""

    def rewards() -> Tensor:
        logp, ref = token_table(LONG, LONG.policy).detach(), token_table(LONG, LONG.reference).detach()
        return implicit_prm.token_rewards(logp, ref, exact.real_tokens(LONG).bool(), beta=BETA)

    def inside(table: Tensor) -> Tensor:
        return (table * exact.real_tokens(LONG)).flatten()

    def steps() -> Tensor:
        """Step 0: the first token; step 1: the others."""
        step = torch.tensor([0, 1, 1]).expand(len(LONG.answers), 3)
        step = torch.where(exact.real_tokens(LONG).bool(), step, -1)
        return implicit_prm.step_rewards(rewards(), step, count=2).flatten()

    def exact_steps() -> Tensor:
        ratio = exact.ratios(LONG, LONG.policy, LONG.reference)
        return BETA * torch.stack([ratio[:, 0], ratio[:, 1] * ratio[:, 2]], 1).log().flatten()

    def whole() -> Tensor:
        return BETA * (exact.fixed(LONG, LONG.policy) / exact.fixed(LONG, LONG.reference)).log()

    def told(read: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        logp, ref = answers(LONG)
        chosen, rejected, ref_chosen, ref_rejected = every_pair(logp, ref)
        return read(
            preference.implicit_rewards(chosen, ref_chosen, beta=BETA),
            preference.implicit_rewards(rejected, ref_rejected, beta=BETA),
        )

    def better() -> Tensor:
        ratio = exact.fixed(LONG, LONG.policy) / exact.fixed(LONG, LONG.reference)
        return (ratio[:, None] > ratio).double().flatten()

    return [
        Certificate(
            "implicit q_values",
            "beta log E_ref[e^(r/beta) | the answer up to and with t]",
            lambda: inside(implicit_prm.q_values(rewards())),
            lambda: inside(right.soft_values(LONG, BETA)),
        ),
        Certificate("implicit outcome", "beta log pi(y)/ref(y)", lambda: implicit_prm.outcome(rewards()), whole),
        Certificate("implicit step_rewards", "beta log of the ratios of each step's tokens", steps, exact_steps),
        Certificate(
            "implicit_rewards", "beta log pi(y)/ref(y)", lambda: told(lambda one, _: one[:: len(whole())]), whole
        ),
        Certificate(
            "margins",
            "beta log (pi_w ref_l)/(ref_w pi_l)",
            lambda: told(preference.margins),
            lambda: (whole()[:, None] - whole()).flatten(),
        ),
        Certificate("preferred", "1[pi_w/ref_w > pi_l/ref_l]", lambda: told(preference.preferred), better),
    ]


def scored() -> list[Certificate]:
    """Accuracy, order and calibration, of probabilities with ties, against plain sums."""
    probability = torch.tensor([0.1, 0.1, 0.3, 0.3, 0.3, 0.6, 0.6, 0.8, 1.0, 0.0], dtype=torch.float64)
    good = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 1, 0]).bool()
    label = good.double()

    def of(pairs: Sequence[float]) -> Tensor:
        return torch.tensor(pairs, dtype=torch.float64)

    # Five bins of width 0.2: 3 rows (mean 1/15, share 1/3), 3 (0.3, 1/3), none, 2 (0.6, 1/2), 2 (0.9, 1).
    table = [(1 / 15, 1 / 3, 3), (0.3, 1 / 3, 3), (0.6, 1 / 2, 2), (0.9, 1.0, 2)]
    gaps = [rows * abs(said - was) for said, was, rows in table]
    return [
        Certificate(
            "auroc",
            "over all pairs",
            lambda: calibration.auroc(probability, label)[None],
            lambda: right.area(probability, good)[None],
        ),
        Certificate(
            "accuracy", "counted", lambda: calibration.accuracy(probability, label)[None], lambda: of([7 / 10])
        ),
        Certificate(
            "brier",
            "counted",
            lambda: calibration.brier(probability, label)[None],
            lambda: of([(0.01 + 0.81 + 0.09 + 0.49 + 0.09 + 0.16 + 0.36 + 0.04 + 0 + 0) / 10]),
        ),
        Certificate(
            "ece",
            "counted",
            lambda: calibration.ece(probability, label, bins=5)[None],
            lambda: of([sum(gaps) / 10]),
        ),
        Certificate(
            "reliability",
            "counted",
            lambda: calibration.reliability(probability, label, bins=5).frequency,
            lambda: of([1 / 3, 1 / 3, 0, 1 / 2, 1]),
        ),
    ]
