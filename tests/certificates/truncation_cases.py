"""Certificates of truncated sampling: the library's cut, its record, and the learner's probabilities within it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from novarl.algos.support import Support, pack_support
from novarl.core.types import Sampling
from novarl.engines.local.sampling import Parameters, truncate
from novarl.kernels import logprobs
from tests.certificates import losses, truncation_exact
from tests.certificates.certificate import COLD, LONG, Certificate
from tests.certificates.expected import Loss, Minibatch, Packed, pack
from tests.certificates.truncation_exact import Rule
from tests.certificates.world import Policy, World

K, P, ALL = Rule(top_k=2), Rule(top_p=0.75), Rule(top_k=2, top_p=0.9, min_p=0.25)


def recorded(world: World, packed: Packed, rule: Rule) -> Support:
    """What the sampler records where it samples the tokens of `packed`."""
    logits = (world.policy.embed[packed.row] @ world.policy.head.T)[packed.prev[packed.prev >= 0]].detach()
    sampling = Sampling(world.policy.temperature, rule.top_k, rule.top_p, rule.min_p, supports=True)
    count = len(logits)
    logp = (logits / world.policy.temperature).log_softmax(-1)
    return pack_support(truncate(logp, Parameters.of([0] * count, [sampling] * count, "cpu"))[0])


def scores(packed: Packed, policy: Policy, support: Support) -> tuple[Tensor, Tensor]:
    """(logp, entropy) [N] of a learner that renormalises over the support."""
    known = packed.prev >= 0
    columns = logprobs.chunked_logprobs(
        policy.embed[packed.row][packed.prev[known]],
        policy.head,
        packed.tokens[known],
        temperature=policy.temperature,
        chunk=7,
        support=support,
    )
    zeros = torch.zeros(len(packed.tokens), dtype=torch.float64)
    logp, entropy = (zeros.masked_scatter(known, column) for column in columns)
    return logp, entropy


def expectation(world: World, rule: Rule, loss: Loss) -> Tensor:
    """E[loss] over all answers that truncated sampling can give."""
    packed = pack(world)
    support = recorded(world, packed, rule)
    logp, entropy = scores(packed, world.policy, support)
    reference = scores(packed, world.reference, support)[0].detach()
    chance = truncation_exact.probabilities(world, world.policy, truncation_exact.supports(world, rule)).detach()
    total = torch.zeros((), dtype=torch.float64)
    for y in chance.nonzero()[:, 0].tolist():
        span = torch.tensor(packed.spans[y])
        own = logp[span]
        columns = (own, entropy[span], own.detach(), own.detach(), reference[span])
        nobody = torch.zeros(len(span), dtype=torch.int64)
        reward, group = world.reward[[y]], torch.zeros(1, dtype=torch.int64)
        batch = Minibatch(*columns, packed.mask[span], packed.state[span], nobody, reward, reward, group)
        total = total + chance[y] * loss(batch)
    return total


def ascent(world: World, rule: Rule, loss: Loss) -> Tensor:
    value = expectation(world, rule, loss)
    return -torch.cat([part.flatten() for part in torch.autograd.grad(value, world.policy.parameters)])


def certificates() -> list[Certificate]:
    def gradient(
        name: str, claim: str, world: World, rule: Rule, loss: Loss, right: Callable[[], Tensor]
    ) -> Certificate:
        return Certificate(name, claim, lambda: ascent(world, rule, loss), right)

    reinforce = losses.policy_loss(losses.none)
    worlds = (("top_k 2", LONG, K), ("top_p 0.75, temperature 0.7", COLD, P), ("top_k, top_p and min_p", LONG, ALL))
    return [
        *(
            gradient(
                f"truncated: {name}",
                "grad J_S",
                world,
                rule,
                reinforce,
                lambda world=world, rule=rule: truncation_exact.reward_gradient(world, rule),  # type: ignore[misc]
            )
            for name, world, rule in worlds
        ),
        gradient(
            "truncated: entropy bonus",
            "sum_s d_S(s) grad H(pi_S(s)), visits d_S fixed",
            LONG,
            K,
            losses.entropy_loss,
            lambda: truncation_exact.entropy_gradient(LONG, K),
        ),
        Certificate(
            "truncated: k1, value",
            "KL(pi_S, ref_S)",
            lambda: expectation(LONG, K, losses.kl_value("k1")),
            lambda: truncation_exact.kl(LONG, K),
        ),
        Certificate(
            "truncated: k3, value",
            "KL(pi_S, ref_S)",
            lambda: expectation(LONG, K, losses.kl_value("k3")),
            lambda: truncation_exact.kl(LONG, K),
        ),
        gradient(
            "truncated: k1 as reward, beta 0.5",
            "grad (J_S - 0.5 KL(pi_S, ref_S))",
            LONG,
            K,
            losses.policy_loss(lambda batch: losses.kl_as_reward(batch, "k1", 0.5)),
            lambda: truncation_exact.kl_regularised_gradient(LONG, K, 0.5),
        ),
    ]
