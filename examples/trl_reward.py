"""Reward functions written for TRL work unchanged: whole batches, and the data's columns by name.

    novarl rl data=gsm8k-train.jsonl prompt_key=question answer_key=answer reward=examples/trl_reward.py:number_reward

A function may be async (then waiting for a server does not hold up the others) and may return None, which marks that
one rollout as failed.
"""

import asyncio
import re


def number_reward(prompts, completions, answer, **columns):
    """1.0 where the completion's last number is the reference's last number."""

    def last_number(text):
        found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
        return found[-1].replace(",", "") if found else None

    texts = [completion[-1]["content"] for completion in completions]
    wanted = [last_number(str(reference)) for reference in answer]
    return [float(last_number(text) == number) for text, number in zip(texts, wanted, strict=True)]


async def brevity_reward(completions, **columns):
    """One over the number of words, as an async judge would return it; nothing to say of an empty completion."""
    await asyncio.sleep(0)
    counts = [len(completion[-1]["content"].split()) for completion in completions]
    return [1.0 / count if count else None for count in counts]
