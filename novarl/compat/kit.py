"""The RLHF Systems Kit's classes (`rlhf_core`) over NovaRL's models, engine and policy learner."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from novarl.algos import kl, surrogates
from novarl.compose.resolve import is_small
from novarl.compose.weights import load_tokenizer
from novarl.core.errors import NovaError, nearest
from novarl.core.event_loop import EventLoop
from novarl.core.types import Prompt, Rollout, Sampling, Scored, Sequence as TokenSequence, Tokenizer
from novarl.data.pack import minibatches, pack, pack_sequences
from novarl.data.render import render_prompt
from novarl.distributed.ranks import Ranks
from novarl.envs.single_turn import SingleTurn
from novarl.learn.agreement import switch_dropout_off
from novarl.learn.credit import CreditRule
from novarl.learn.objective import Objective
from novarl.learn.optim import OptimSettings
from novarl.learn.policy import PolicyLearner
from novarl.learn.scorer import Scorer
from novarl.loops.state import Pending
from novarl.models import tiny
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.forward import token_logprobs
from novarl.models.load import load
from novarl.models.reference import freeze
from novarl.rewards.endings import ending
from novarl.rewards.length import moderation
from novarl.rewards.sentiment import polarity
from novarl.run.sampler import Sampler, local_engine

MODEL = "sshleifer/tiny-gpt2"
REWARDS: dict[str, Callable[[str], float]] = {"sentiment": polarity, "preference": ending, "length": moderation}
BUDGET = 2048
"""Tokens in one forward and backward pass."""


def set_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, and make cuDNN deterministic.

    A `PolicyModel` samples from torch's generator; a `PPOTrainer` takes its seed from it when it is made.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True


class PolicyModel(nn.Module):
    """A causal language model, "tiny", a directory or a hub id, with its tokenizer."""

    def __init__(self, model_name: str = MODEL, device: str = "cpu") -> None:
        super().__init__()
        self.policy = load(model_name, device=device)
        self.model, self.tokenizer = self.policy.model, self.policy.tokenizer
        switch_dropout_off(self.model)

    def sample(
        self,
        prompt_ids: Tensor,
        max_new_tokens: int = 20,
        temperature: float = 1.0,
        top_p: float = 1.0,
        *,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(sequences [B, P + T], log-probabilities [B, T] of the sampled tokens) for prompts [B, P].

        Each row of `sequences` is a prompt without its padding and its answer, then pad tokens; log-probabilities are
        those of the distribution that was sampled from, 0 past an answer's end. Temperature 0 is greedy.
        """
        prompts = [tuple(row.tolist()) for row in _rows(prompt_ids, attention_mask)]
        sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=max_new_tokens)
        asked = [Prompt(str(number), prompt, ()) for number, prompt in enumerate(prompts)]
        rollouts = self.rollouts(asked, sampling, samples=1, seed=int(torch.randint(2**62, ())), step=0)
        sequences = [torch.tensor(rollout.sequences[0].tokens) for rollout in rollouts]
        logps = [torch.tensor(rollout.sequences[0].behavior_logp) for rollout in rollouts]
        answers = [logp[len(prompt) :] for logp, prompt in zip(logps, prompts, strict=True)]
        padded = pad_sequence(sequences, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        return padded.to(prompt_ids.device), pad_sequence(answers, batch_first=True).to(prompt_ids.device)

    def rollouts(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples: int, seed: int, step: int
    ) -> list[Rollout]:
        """`samples` answers to each prompt, by streams that depend on the seed and the step."""
        engine, loop = local_engine(self.policy), EventLoop()
        sampler = Sampler(
            engine=engine,
            env=SingleTurn,
            tokenizer=self.tokenizer,
            sampling=sampling,
            max_turns=1,
            context=self.policy.context,
            apply_chat_template=False,
            samples=samples,
            seed=seed,
            ends=self.policy.eos_ids,
            loop=loop,
        )
        try:
            return sampler.train(list(enumerate(prompts)), step)
        finally:
            engine.close()
            loop.close()

    def get_logprobs(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """log p(token_t | before) [B, T - 1] of every token but the first; 0 at padding. Differentiable."""
        rows = _rows(input_ids, attention_mask)
        logp, _ = token_logprobs(self.model, _packed(rows, self._device), compute_dtype=self.policy.compute_dtype)
        parts = logp.split([len(row) for row in rows])
        return pad_sequence([part[1:] for part in parts], batch_first=True)

    def get_kl_divergence(
        self, input_ids: Tensor, reference_model: PolicyModel, attention_mask: Tensor | None = None
    ) -> Tensor:
        """KL(policy || reference) [B], estimated on the given tokens by k3 and summed over each row."""
        with torch.no_grad():
            reference = reference_model.get_logprobs(input_ids, attention_mask)
        return kl.k3(self.get_logprobs(input_ids, attention_mask), reference).sum(1)

    def save_checkpoint(self, path: str | Path) -> None:
        """Write the weights to a file; `novarl.models.load.save(policy.policy, folder)` writes a model directory."""
        _write({"model": self.model.state_dict()}, path)

    def load_checkpoint(self, path: str | Path) -> None:
        self.model.load_state_dict(torch.load(path, map_location=self._device, weights_only=True)["model"])

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


class ToyRewardModel:
    """Rule-based rewards of a text: "sentiment", "preference" or "length" (`novarl.rewards`).

    `compute_reward` takes strings, or token ids that it decodes with the tokenizer of `model_name`.
    """

    def __init__(self, model_name: str = MODEL, device: str = "cpu") -> None:
        self.model_name, self.device = model_name, device

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return ByteTokenizer() if self.model_name in tiny.SIZES else load_tokenizer(self.model_name)

    def compute_reward(self, sequences: Tensor | Sequence[str], reward_type: str = "sentiment") -> Tensor:
        """One reward [B] for each sequence, of all its text: pass the answer alone to leave the prompt out."""
        if reward_type not in REWARDS:
            raise NovaError(f"unknown reward {reward_type!r}", where="reward_type", fix=nearest(reward_type, REWARDS))
        texts = [
            text if isinstance(text, str) else self.tokenizer.decode(text.tolist(), skip_special_tokens=True)
            for text in sequences
        ]
        return torch.tensor([REWARDS[reward_type](text) for text in texts], device=self.device)


class PPOTrainer:
    """PPO's clipped ratio, the mean of each prompt's answers for a baseline, and KL to the reference as a loss.

    learning_rate   null: 1e-3 for a model of the built-in ones' size, else the kit's 1e-5
    updates         optimizer updates on each step's answers
    seed            of sampling; null: the seed that torch has, as `set_seed` sets it

    The reference is frozen. `reward_model` is anything with `compute_reward(answers, reward_type=...)`.
    """

    def __init__(
        self,
        policy_model: PolicyModel,
        reference_model: PolicyModel,
        reward_model: ToyRewardModel,
        device: str = "cpu",
        learning_rate: float | None = None,
        kl_coef: float = 0.1,
        clip_ratio: float = 0.2,
        entropy_coef: float = 0.0,
        max_grad_norm: float = 1.0,
        *,
        responses_per_prompt: int = 8,
        updates: int = 4,
        reward_type: str = "sentiment",
        seed: int | None = None,
    ) -> None:
        if reference_model.model is policy_model.model:
            what = "the policy is its own reference, so KL would always be 0"
            raise NovaError(what, where="reference_model", fix="make a second PolicyModel")
        self.policy_model, self.reward_model, self.reward_type = policy_model.to(device), reward_model, reward_type
        self.reference_model = reference_model.to(device)
        freeze(self.reference_model.model)
        self.responses_per_prompt, self.updates = responses_per_prompt, updates
        self.seed = (torch.initial_seed() if seed is None else seed) % 2**63
        self.step = 0
        self._credit = CreditRule("group" if responses_per_prompt > 1 else "mean")
        if learning_rate is None:
            learning_rate = 1e-3 if is_small(policy_model.model) else 1e-5
        scorer = Scorer(policy_model.model, compute_dtype=policy_model.policy.compute_dtype)
        self._learner = PolicyLearner(
            policy_model.model,
            scorer,
            objective=Objective(
                partial(surrogates.ppo_clip, clip_low=clip_ratio, clip_high=clip_ratio),
                "token",
                1.0,
                kl_loss_coef=kl_coef,
                entropy_coef=entropy_coef,
                proportional=True,
            ),
            optim=OptimSettings(lr=learning_rate, max_grad_norm=max_grad_norm),
            ranks=Ranks(),
            budget=BUDGET,
            reference=replace(scorer, model=reference_model.model),
            needs_old_logp=updates > 1,
        )

    def train_step(self, prompts: Sequence[str], max_new_tokens: int = 20) -> dict[str, float]:
        """Sample answers to each prompt, score them, and learn from them; returns the step's metrics."""
        tokenizer = self.policy_model.tokenizer
        asked = []
        for number, text in enumerate(prompts):
            messages = ({"role": "user", "content": text},)
            tokens = render_prompt(tokenizer, messages, apply_chat_template=False)
            asked.append(Prompt(str(number), tokens, messages))
        rollouts = self.policy_model.rollouts(
            asked,
            Sampling(max_tokens=max_new_tokens),
            samples=self.responses_per_prompt,
            seed=self.seed,
            step=self.step,
        )
        answers = [rollout.text for rollout in rollouts]
        rewards = self.reward_model.compute_reward(answers, reward_type=self.reward_type).double()
        pairs = zip(rollouts, rewards.tolist(), strict=True)
        batch = pack([Scored(rollout, {self.reward_type: reward}, reward) for rollout, reward in pairs])
        scores = self._learner.score(batch)
        credit, about, _ = self._credit(batch, scores, None)
        order = minibatches(batch.group.tolist(), self.updates, seed=self.seed + self.step)
        pending, records = Pending(batch, scores, credit, order, {}), []
        while not pending.used_up:
            records.append(self._learner.update(*pending.next()))
        self.step += 1
        metrics = {name: fmean(record[name] for record in records if name in record) for name in records[0]}
        spread = rewards.std(correction=0).item()
        said = {"step": float(self.step), "reward_mean": rewards.mean().item(), "reward_std": spread}
        return metrics | about | said | {"kl_loss": metrics["kl_penalty"]}

    def save_checkpoint(self, path: str | Path) -> None:
        """Weights, optimizer, step and seed, in one file: a trainer that loads it goes on bit by bit."""
        model, learner = self.policy_model.model.state_dict(), self._learner.state_dict()
        _write({"model": model, "learner": learner, "step": self.step, "seed": self.seed}, path)

    def load_checkpoint(self, path: str | Path) -> None:
        state = torch.load(path, map_location=self.policy_model._device, weights_only=True)
        self.policy_model.model.load_state_dict(state["model"])
        self._learner.load_state_dict(state["learner"])
        self.step, self.seed = state["step"], state["seed"]


def _rows(ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    if ids.dim() != 2:
        raise NovaError(f"token ids of shape {list(ids.shape)}", where="input_ids", fix="give [batch, length]")
    return (
        list(ids)
        if attention_mask is None
        else [row[kept.bool()] for row, kept in zip(ids, attention_mask, strict=True)]
    )


def _packed(rows: Sequence[Tensor], device: torch.device) -> Any:
    """The rows as one flat batch on the device, every token but the first of each wanted."""
    sequences = []
    for row in rows:
        count = len(row)
        zeros = (0.0,) * count
        mask = (False, *(True,) * (count - 1))
        sequences.append(TokenSequence(tuple(row.tolist()), mask, zeros, zeros, (0,) * count))
    batch = pack_sequences(sequences)
    names = ("tokens", "position_ids", "prev", "cu_seqlens")
    return replace(batch, **{name: getattr(batch, name).to(device) for name in names})


def _write(state: dict[str, Any], path: str | Path) -> None:
    """The whole file or none: a process that dies while writing leaves the old one."""
    part = Path(f"{path}.part")
    torch.save(state, part)
    os.replace(part, path)
