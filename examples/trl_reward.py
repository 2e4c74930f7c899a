"""Reward functions written for TRL work unchanged: whole batches, columns by name.

    novarl rl data=gsm8k-train.jsonl prompt_key=question answer_key=answer reward=examples/trl_reward.py:number_reward

A completion is a string where the data's prompts are strings, as there, and a list of messages where they are messages.
A function may be async (then waiting for a server does not hold up the others). None from one of several functions
means that it does not apply to the answer; where none applies, that rollout has failed. `completion_ids`, `log_extra`
and `log_metric` are there, and `trainer_state` with `global_step` and `max_steps`.
"""

import asyncio
import re


def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def number_reward(prompts, completions, answer, **columns):
    """1.0 where the completion's last number is the reference's last number."""

    def last_number(text):
        found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
        return found[-1].replace(",", "") if found else None

    wanted = [last_number(str(reference)) for reference in answer]
    return [
        float(last_number(text_of(completion)) == number)
        for completion, number in zip(completions, wanted, strict=True)
    ]


async def brevity_reward(completions, **columns):
    """One over the number of words, as an async judge would return it; nothing to say of an empty completion."""
    await asyncio.sleep(0)
    counts = [len(text_of(completion).split()) for completion in completions]
    return [1.0 / count if count else None for count in counts]
