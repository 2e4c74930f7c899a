"""Certificates of the family of surrogates, of the corrections beside the first, and of corrected KL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from novarl.algos import aggregate, kl, off_policy, surrogates
from tests.certificates import exact, losses, surrogate_exact
from tests.certificates.certificate import CAP, LONG, MIDDLE, SHORT, Certificate, certify, grad_j, scored
from tests.certificates.expected import Loss, Minibatch, expectation
from tests.certificates.surrogate_exact import answer_ratio, rooted
from tests.certificates.world import World

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
LOW, HIGH = 0.8, 1.28
DUAL_HIGH, DUAL = 1.1, 1.2
SEQUENCE_BOUNDS = {"clip_low": 0.08, "clip_high": 0.12}
TOKEN_BAND = {"low": 0.75, "high": 1.2}
SEQUENCE_BAND = {"low": 0.8, "high": 1.1}
ROOT_BAND = {"low": 0.88, "high": 1.06}
TAUS = {"tau_pos": 2.0, "tau_neg": 3.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "dual_clip": {"clip_low": 0.2, "clip_high": 0.1, "clip_dual": DUAL},
    "gspo": SEQUENCE_BOUNDS,
    "cispo": BOUNDS,
    "sapo": TAUS,
    "gpg": {},
}
GROUPS = [7, 7, -3, -3]


def surrogate_loss(name: str, credit: losses.Credit, *, how: str = "constant", old: bool = False) -> Loss:
    """A surrogate of this family; the old policy is the current one, or with `old` the world's."""

    def loss(batch: Minibatch) -> Tensor:
        options = dict(OPTIONS[name])
        if name == "gspo":
            options["sequence"] = batch.traj
        if name == "gpg":
            options["alpha"] = surrogates.gpg_alpha(batch.reward, batch.group)
        before = batch.old_logp if old else batch.logp.detach()
        advantage = credit(batch)[batch.traj] * batch.mask
        per_token, _ = getattr(surrogates, name)(batch.logp, before, advantage, batch.mask, **options)
        return (per_token * losses.weights(batch, how, 1.0)).sum()

    return loss


def corrected_loss(name: str, *, bounds: dict[str, float], by_sequence: bool = False, geometric: bool = False) -> Loss:
    """REINFORCE times a correction, of answers that the world's `behavior` sampled."""

    def loss(batch: Minibatch) -> Tensor:
        options: dict[str, Any] = {"sequence": batch.traj, "geometric": geometric} if by_sequence else {}
        weight = getattr(off_policy, name)(batch.logp.detach(), batch.behavior_logp, batch.mask, **options, **bounds)
        per_token, _ = surrogates.reinforce(
            batch.logp, batch.logp.detach(), batch.reward[batch.traj] * batch.mask, batch.mask
        )
        return (per_token * weight * losses.weights(batch, "constant", 1.0)).sum()

    return loss


def corrected_kl(estimator: str, *, old: bool) -> Loss:
    """The estimator as a loss, times pi / pi_old."""

    def loss(batch: Minibatch) -> Tensor:
        before = batch.old_logp if old else batch.logp.detach()
        per_token = kl.corrected(getattr(kl, estimator)(batch.logp, batch.ref_logp), batch.logp, before)
        return (per_token * losses.weights(batch, "constant", 1.0)).sum()

    return loss


def on_policy() -> list[Certificate]:
    def case(name: str, world: World, k: int, credit: losses.Credit) -> Certificate:
        return certify(f"{name} at ratio 1", "grad J", world, k, surrogate_loss(name, credit), grad_j(world))

    return [
        *(case(name, LONG, 1, losses.none) for name in ("dual_clip", "cispo", "sapo")),
        case("gspo", MIDDLE, 2, losses.leave_one_out),
        certify(
            "gspo at ratio 1, sequence aggregation",
            "E[R/L grad log pi(y)]",
            MIDDLE,
            2,
            surrogate_loss("gspo", losses.none, how="sequence"),
            scored(MIDDLE, lambda: MIDDLE.reward / MIDDLE.lengths),
        ),
        certify(
            "gpg, two groups of 2",
            "(1 + f)(1 - 1/2) grad J, f = P(two equal rewards)",
            SHORT,
            4,
            surrogate_loss("gpg", losses.group),
            lambda: grad_j(SHORT, (1 + surrogate_exact.flat_rate(SHORT)) / 2)(),
            groups=GROUPS,
        ),
    ]


def off_policy_surrogates() -> list[Certificate]:
    def case(name: str, claim: str, weight: Callable[[], Tensor]) -> Certificate:
        loss = surrogate_loss(name, losses.none, old=True)
        right = surrogate_exact.off_policy(LONG, LONG.old, weight)
        return certify(f"{name} off policy", claim, LONG, 1, loss, right, sampler=LONG.old)

    return [
        certify(
            "gspo off policy",
            "E_old[1[not clipped at 0.92 or 1.12] s R/L grad log pi(y)], s = (pi(y)/pi_old(y))^(1/L)",
            LONG,
            1,
            surrogate_loss("gspo", losses.none, how="sequence", old=True),
            surrogate_exact.off_policy(LONG, LONG.old, lambda: surrogate_exact.gspo(LONG, 0.92, 1.12)),
            sampler=LONG.old,
        ),
        certify(
            "gspo off policy, B=2",
            "E_old[1[not clipped at 0.92 or 1.12] s R/L grad log pi(y)]",
            MIDDLE,
            2,
            surrogate_loss("gspo", losses.none, how="sequence", old=True),
            surrogate_exact.off_policy(MIDDLE, MIDDLE.old, lambda: surrogate_exact.gspo(MIDDLE, 0.92, 1.12)),
            sampler=MIDDLE.old,
        ),
        case(
            "dual_clip",
            "E_old[sum_t 1[not clipped at 0.8, 1.1 or 1.2] r_t R grad log pi(y_t)]",
            lambda: surrogate_exact.dual_clip(LONG, LOW, DUAL_HIGH, DUAL),
        ),
        case(
            "cispo",
            "E_old[sum_t clip(r_t, 0.8, 1.28) R grad log pi(y_t)]",
            lambda: surrogate_exact.cispo(LONG, LOW, HIGH),
        ),
        case(
            "sapo",
            "E_old[sum_t r_t / cosh^2(tau (r_t - 1)/2) R grad log pi(y_t)]",
            lambda: surrogate_exact.sapo(LONG, 2.0, 3.0),
        ),
    ]


def corrections() -> list[Certificate]:
    """Where a correction is exact, and what it does where it is not."""
    at_sequence = partial(corrected_loss, by_sequence=True)
    wide = {"low": 0.0, "high": 1e9}

    def rho() -> Tensor:
        return answer_ratio(MIDDLE, MIDDLE.policy, MIDDLE.behavior)

    def within(weight: Tensor, band: dict[str, float]) -> Tensor:
        return weight * ~surrogate_exact.outside(weight, band["low"], band["high"])

    def case(name: str, claim: str, loss: Loss, weight: Callable[[], Tensor] | None = None) -> Certificate:
        right = grad_j(MIDDLE) if weight is None else surrogate_exact.off_policy(MIDDLE, MIDDLE.behavior, weight)
        return certify(name, claim, MIDDLE, 2, loss, right, sampler=MIDDLE.behavior)

    return [
        certify(
            "masked weight, one token, no bounds",
            "grad J",
            SHORT,
            2,
            corrected_loss("masked_weight", bounds=wide),
            grad_j(SHORT),
            sampler=SHORT.behavior,
        ),
        certify(
            "masked weight",
            "E_mu[sum_t rho_t 1[0.75 <= rho_t <= 1.2] R grad log pi(y_t)], rho_t = pi/mu",
            LONG,
            1,
            corrected_loss("masked_weight", bounds=TOKEN_BAND),
            surrogate_exact.off_policy(
                LONG, LONG.behavior, lambda: within(exact.ratios(LONG, LONG.policy, LONG.behavior), TOKEN_BAND)
            ),
            sampler=LONG.behavior,
        ),
        case(
            "sequence truncated weight, no cap",
            "grad J",
            at_sequence("sequence_truncated_weight", bounds={"maximum": 1e9}),
        ),
        case(
            "sequence truncated weight",
            "E_mu[min(rho, 1.1) R grad log pi(y)], rho = pi(y)/mu(y)",
            at_sequence("sequence_truncated_weight", bounds={"maximum": CAP}),
            lambda: rho().clamp(max=CAP),
        ),
        case(
            "sequence truncated weight, geometric",
            "E_mu[min(rho^(1/L), 1.1) R grad log pi(y)]",
            at_sequence("sequence_truncated_weight", bounds={"maximum": CAP}, geometric=True),
            lambda: rooted(MIDDLE, rho()).clamp(max=CAP),
        ),
        case("sequence masked weight, no bounds", "grad J", at_sequence("sequence_masked_weight", bounds=wide)),
        case(
            "sequence masked weight",
            "E_mu[rho 1[0.8 <= rho <= 1.1] R grad log pi(y)]",
            at_sequence("sequence_masked_weight", bounds=SEQUENCE_BAND),
            lambda: within(rho(), SEQUENCE_BAND),
        ),
        case(
            "sequence masked weight, geometric",
            "E_mu[rho^(1/L) 1[0.88 <= rho^(1/L) <= 1.06] R grad log pi(y)]",
            at_sequence("sequence_masked_weight", bounds=ROOT_BAND, geometric=True),
            lambda: within(rooted(MIDDLE, rho()), ROOT_BAND),
        ),
    ]


def kl_corrections() -> list[Certificate]:
    def off(estimator: str) -> Certificate:
        return certify(
            f"corrected {estimator} as loss, off policy",
            "-sum_s d_old(s) grad KL(pi(s), ref(s)), the visits d_old of the old policy",
            LONG,
            1,
            corrected_kl(estimator, old=True),
            lambda: -surrogate_exact.visited_kl_gradient(LONG, LONG.old),
            sampler=LONG.old,
        )

    def squared(batch: Minibatch) -> Tensor:
        per_answer, _ = aggregate.per_sequence(kl.k1(batch.logp, batch.ref_logp), batch.mask, batch.traj)
        return per_answer.square().mean()

    return [
        off("k3"),
        off("k1"),
        certify(
            "corrected k3 as loss, on policy",
            "as k2 as loss",
            LONG,
            1,
            corrected_kl("k3", old=False),
            lambda: -exact.per_state_gradient(LONG, "reverse_kl"),
        ),
        certify(
            "corrected k3 as loss, off policy, one token",
            "-grad KL(pi, ref)",
            SHORT,
            1,
            corrected_kl("k3", old=True),
            lambda: exact.kl_regularised_gradient(SHORT, 1.0) - exact.objective_gradient(SHORT, SHORT.reward),
            sampler=SHORT.old,
        ),
        Certificate(
            "k1 per sequence, its mean square, B=2",
            "E[(log pi(y)/ref(y))^2]",
            lambda: expectation(MIDDLE, 2, squared),
            lambda: surrogate_exact.squared_log_ratio(MIDDLE),
        ),
    ]
