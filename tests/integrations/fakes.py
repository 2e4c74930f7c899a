"""A trainer with the attributes of TRL's GRPO trainer that the callback reads, which plays back recorded answers."""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import torch

LETTERS = " abcdefghij"
END = len(LETTERS)
SIZE = 2
"""Answers to a prompt."""


class Tokenizer:
    pad_token_id = END

    def decode(self, ids: list[int]) -> str:
        return "".join("<end>" if token == END else LETTERS[token] for token in ids)


class Handler:
    """transformers' CallbackHandler: calls every event of every callback."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def call(self, event: str, args: Any, state: Any, **kwargs: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(args, state, SimpleNamespace(), model=None, **kwargs)


class GRPOConfig:
    """The arguments of a training."""

    output_dir, seed, device, world_size = "out", 42, "cpu", 1
    num_generations = SIZE

    def to_dict(self) -> dict[str, Any]:
        return {"num_generations": SIZE, "learning_rate": 1e-6, "hub_token": "<HUB_TOKEN>"}


class Trainer:
    """Plays back `generations`, one a step: lists of (prompt, answer, reward or nan)."""

    def __init__(self, generations: list[list[tuple[str, str, float]]], *, every: int = 1) -> None:
        self.generations, self.every = generations, every
        self.args, self.callback_handler = GRPOConfig(), Handler()
        self.state = SimpleNamespace(global_step=0, max_steps=len(generations), is_world_process_zero=True)
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(num_processes=1, process_index=0)
        self.processing_class, self.eos_token_ids = Tokenizer(), [END]
        self.reward_weights = torch.tensor([2.0, 1.0])
        length = len(generations[0])
        self._logs: dict[str, Any] = {name: deque(maxlen=length) for name in ("prompt", "completion", "advantages")}
        self._logs |= {name: defaultdict(lambda: deque(maxlen=length)) for name in ("rewards", "extra")}
        self.history: list[dict[str, Any]] = []

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.callbacks.append(callback)

    def call(self, event: str, **kwargs: Any) -> None:
        self.callback_handler.call(event, self.args, self.state, **kwargs)

    def train(self) -> None:
        self.call("on_train_begin")
        for generation in self.generations:
            self.call("on_step_begin")
            batch = self._generate_and_score_completions(generation)  # type: ignore[arg-type]
            order = torch.tensor(list(reversed(range(len(generation)))))  # TRL shuffles what it trains on
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)[order]
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)[order]
            self._get_per_token_logps_and_entropies(self.model, ids, mask, batch["completion_ids"].shape[1])
            self.state.global_step += 1
            self.call("on_step_end")
            if self.state.global_step % self.every == 0:
                self.log({"loss": 0.5, "reward": 1.0, "kl": 0.1, "epoch": 0.1, "note": "text"})
            self.call("on_save")
        self.evaluate()
        self.log({"train_runtime": 3.0, "train_loss": 0.5, "epoch": 1.0})
        self.call("on_train_end")

    def evaluate(self) -> None:
        self.model.training = False
        self._generate_and_score_completions([("held out", "j", 1.0)])
        self.model.training = True
        self.log({"eval_reward": 0.25, "eval_runtime": 2.0, "epoch": 1.0})

    def log(self, logs: dict[str, Any]) -> None:
        self.history.append({**logs, "step": self.state.global_step})
        self.call("on_log", logs=logs)

    def _generate_and_score_completions(self, rows: list[tuple[str, str, float]]) -> dict[str, Any]:
        longest = max(len(answer) for _, answer, _ in rows) + 1
        tokens = [[LETTERS.index(letter) for letter in answer] + [END] * (answer != "jjj") for _, answer, _ in rows]
        prompts = torch.tensor([[place] for place, _ in enumerate(rows)])
        self._logs["prompt"].extend(prompt for prompt, _, _ in rows)
        self._logs["completion"].extend(answer for _, answer, _ in rows)
        self._logs["rewards"]["first"].extend(reward for _, _, reward in rows)
        self._logs["rewards"]["second"].extend(float("nan") if reward != reward else 0.5 for _, _, reward in rows)
        self._logs["advantages"].extend(0.0 if reward != reward else reward - 1 for _, _, reward in rows)
        self._logs["extra"]["letters"].extend(len(answer) for _, answer, _ in rows)
        padded = [row + [END] * (longest - len(row)) for row in tokens]
        return {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": torch.tensor(padded),
            "completion_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in tokens]),
            "ref_per_token_logps": torch.tensor(padded) * -0.5,
        }

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, keep: int) -> Any:
        completions = ids[:, -keep:]
        return completions * -0.25 - ids[:, :1], completions * 0.125, None
