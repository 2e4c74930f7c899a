"""A small model that has learnt something, and rollouts recorded with it: what every exactness test runs on.

On an untrained model all tokens are nearly equally likely, gradients are tiny and alike, and a fault of position, mask
or temperature moves the log-probabilities by less than rounding does. This one knows its few answers almost by heart
(mean log-probability above -0.5), yet has three of different lengths for each prompt, so that rewards vary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from novarl.core.types import Prompt, Rollout, Sampling, Scored, Sequence
from novarl.data.pack import pack_sequences
from novarl.data.render import render_prompt, render_sft
from novarl.envs.single_turn import SingleTurn
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.forward import token_logprobs
from novarl.models.load import Policy
from novarl.models.transformer import Decoder, DecoderConfig
from novarl.run.sampler import Sampler, local_engine

Model = TypeVar("Model", bound=nn.Module)
WORDS = ("ab", "cde", "fghi", "jklmn", "opqrst", "uv")
SHARP = -0.5
"""Mean log-probability of a sampled token, in nats, above which a model counts as sharp."""
LEARNT = -0.148
"""Where training stops: between three answers of some seven tokens a token has -0.14 nats at best."""


def fresh(seed: int = 0) -> Policy:
    """The untrained model: two layers, grouped heads, a tied head, and the byte tokenizer."""
    tokenizer = ByteTokenizer()
    config = DecoderConfig(
        vocab_size=272,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=48**-0.5,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Decoder(config, seed=seed).eval()
    return Policy(model, tokenizer, "sharp", (tokenizer.eos_token_id,), config.max_position_embeddings)


def question(word: str) -> dict[str, str]:
    return {"role": "user", "content": f"say {word}"}


def answers(word: str) -> tuple[str, str, str]:
    """What the model is taught to say, each as often as the others."""
    return word, f"{word} {word}", f"not {word[::-1]}!"


@cache
def prompts() -> tuple[Prompt, ...]:
    tokenizer = ByteTokenizer()
    return tuple(Prompt(word, render_prompt(tokenizer, [question(word)]), (question(word),), word) for word in WORDS)


@cache
def lessons() -> tuple[Sequence, ...]:
    """Every answer to every prompt, as sequences to imitate."""
    found = []
    for word in WORDS:
        for answer in answers(word):
            chat = [question(word), {"role": "assistant", "content": answer}]
            ((tokens, mask),) = render_sft(ByteTokenizer(), chat, context=1)
            none = (0.0,) * len(tokens)
            found.append(Sequence(tokens, mask, none, none, (-1,) * len(tokens)))
    return tuple(found)


def teach(model: nn.Module) -> dict[str, Tensor]:
    """Train `model` on the lessons until it is sharp; its weights by name. Takes about a second."""
    torch.set_num_threads(1)
    batch = pack_sequences(lessons())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(200):
        logp, _ = token_logprobs(model, batch, wanted=batch.mask)
        mean = logp.sum() / batch.mask.sum()
        if mean > LEARNT:
            break
        optimizer.zero_grad()
        (-mean).backward()
        optimizer.step()
    assert mean > LEARNT, f"the model did not learn its answers: {mean:.2f} nats a token"
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@cache
def _weights() -> dict[str, Tensor]:
    return teach(fresh().model)


def sharp_policy(dtype: torch.dtype = torch.float32) -> Policy:
    """A new copy of the trained model, in `dtype`."""
    policy, weights = fresh(), _weights()
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.copy_(weights[name])
    return replace(policy, model=policy.model.to(dtype), compute_dtype=dtype)


def perturbed(model: Model, size: float, seed: int = 0) -> Model:
    """A copy whose matrices are off by noise of `size` times their own deviation: an older policy, or a reference."""
    other = deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = size * float(parameter.std()) if parameter.ndim > 1 else 0.0
            parameter.add_((scale * noise).to(parameter.dtype))
    return other


def sampler(policy: Policy, *, samples: int = 4, seed: int = 0, greedy_twin: bool = False, **sampling: Any) -> Sampler:
    """The real sampler, on the policy's own weights."""
    return Sampler(
        engine=local_engine(policy),
        env=SingleTurn,
        tokenizer=policy.tokenizer,
        sampling=replace(Sampling(max_tokens=16), **sampling),
        max_turns=1,
        context=policy.context,
        apply_chat_template=True,
        samples=samples,
        seed=seed,
        greedy_twin=greedy_twin,
    )


def reward(text: str, word: str) -> float:
    """1 for the word itself; and a little for length, so that hardly two different answers are worth the same."""
    return float(text == word) + 0.01 * len(text)


def score(rollouts: Seq[Rollout]) -> list[Scored]:
    values = [reward(rollout.text, str(rollout.prompt.answer)) for rollout in rollouts]
    return [Scored(rollout, {"said": value}, value) for rollout, value in zip(rollouts, values, strict=True)]


def check(scored: Seq[Scored]) -> None:
    """What must be true of rollouts before a test on them says anything: a sharp policy, rewards that vary, lengths
    that differ."""
    logp = [
        value
        for item in scored
        for sequence in item.rollout.sequences
        for value, chosen in zip(sequence.behavior_logp, sequence.mask, strict=True)
        if chosen
    ]
    assert sum(logp) / len(logp) > SHARP, "the recorded policy is not sharp"
    groups: dict[int, set[float | None]] = {}
    for item in scored:
        groups.setdefault(item.rollout.group, set()).add(item.reward)
    varied = sum(len(rewards) > 1 for rewards in groups.values())
    assert varied >= len(groups) - 1, f"rewards vary in {varied} of {len(groups)} groups only"
    assert len({sum(sequence.mask) for item in scored for sequence in item.rollout.sequences}) > 3


def record(policy: Policy, *, step: int = 0, samples: int = 4, **sampling: Any) -> tuple[Scored, ...]:
    """Scored rollouts of every prompt, sampled by the real engine."""
    scored = tuple(score(sampler(policy, samples=samples, **sampling).train(list(enumerate(prompts())), step)))
    check(scored)
    return scored


@cache
def recorded(step: int = 0) -> tuple[Scored, ...]:
    """Rollouts of the trained model."""
    return record(sharp_policy(), step=step)
