"""What `novarl.integrations.trl.NovaCallback` costs: GRPO of TRL on a CPU, with and without it, in turn.

python -m benchmarks.peers.run_trl_callback [--rounds 3] [--steps 6]        in `.venv-trl`: make bench-trl-callback

The processor time spent in the callback, as a share of that of the training, hardly changes on a busy machine. The
times with and without it do, most of all by the clock.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

import torch
import transformers
import trl
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from novarl.core import processor
from novarl.integrations.trl import NovaCallback
from novarl.integrations.trl_rollouts import RolloutRecorder
from tests.integrations.real import tiny

EVENTS = ("on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_save", "on_train_end")
SIZE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
ANSWERS, TOKENS = 16, 64


class Clock(TrainerCallback):
    """The time from the beginning of each step to that of the next."""

    def __init__(self):
        self.begins = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.begins.append(time.perf_counter())

    @property
    def steps(self):
        """Without the first step, which allocates memory."""
        return [after - before for before, after in zip(self.begins[1:], self.begins[2:], strict=False)]


class Spent:
    """Seconds in functions that were given to it."""

    def __init__(self):
        self.seconds = 0.0

    def on(self, function):
        def timed(*args, **kwargs):
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - began

        return timed


def letters(completions, **columns):
    return [sum(map(ord, text)) % 11 / 10 for text in completions]


def train(model, steps, watched):
    """Median seconds of a step; processor seconds of the training, and of the callback in it."""
    spent, clock = Spent(), Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = {**tiny.SETTINGS, "max_steps": steps, "save_strategy": "no", "per_device_train_batch_size": ANSWERS}
        trainer = trl.GRPOTrainer(
            model=str(model),
            reward_funcs=letters,
            args=trl.GRPOConfig(
                output_dir=folder,
                **settings,
                num_generations=8,
                max_completion_length=TOKENS,
                beta=0.04,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": [f"write {number}: " for number in range(64)]}),
            processing_class=tiny.tokenizer(),
        )
        trainer.add_callback(clock)
        whole = RolloutRecorder._add
        if watched:
            callback = NovaCallback(Path(folder) / "run")
            for name in EVENTS:
                setattr(callback, name, spent.on(getattr(callback, name)))
            RolloutRecorder._add = spent.on(whole)
            trainer.add_callback(callback)
        began = time.process_time()
        try:
            trainer.train()
        finally:
            RolloutRecorder._add = whole
        seconds = time.process_time() - began
        if watched and callback.failure is not None:
            raise callback.failure
    return median(clock.steps), seconds, spent.seconds


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--steps", type=int, default=6)
    given = asked.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    made = tiny.tokenizer()
    ends = {"pad_token_id": made.pad_token_id, "eos_token_id": made.eos_token_id}
    plain, watched = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(made), num_key_value_heads=2, **SIZE, **ends))
        model.save_pretrained(folder)
        size = sum(parameter.numel() for parameter in model.parameters())
        train(folder, 3, True)  # what is loaded and allocated once is of neither side
        for number in range(given.rounds):
            for with_it in (False, True) if number % 2 else (True, False):
                (watched if with_it else plain).append(train(folder, given.steps, with_it))
    shares = [spent / seconds for _, seconds, spent in watched]
    steps, processor_seconds = ([min(one[of] for one in side) for side in (plain, watched)] for of in (0, 1))
    print(f"machine            {processor.name()}, {torch.get_num_threads()} thread, {platform.system()}")
    print(
        f"versions           trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    )
    print(
        f"work               {size:,} weights, {ANSWERS} answers of up to {TOKENS} tokens a step, {given.steps} steps"
    )
    print(f"a step             {steps[0]:.3f} s without, {steps[1]:.3f} s with, by the clock (least of {given.rounds})")
    print(f"processor time     {processor_seconds[0]:.2f} s without, {processor_seconds[1]:.2f} s with (least)")
    print(f"in the callback    {median(shares):.2%} of the processor time of training (worst round {max(shares):.2%})")


if __name__ == "__main__":
    main()
