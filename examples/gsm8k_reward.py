"""A reward for grade-school mathematics (GSM8K), whose solutions end in `#### N`.

    novarl rl data=gsm8k-train.jsonl prompt_key=question answer_key=answer reward=examples/gsm8k_reward.py:reward_fn

Any Python file will do: NovaRL calls `reward_fn(messages, answer)` in a process of its own, with a time limit.
`messages` is the conversation, the model's answer last; `answer` is the row's, here the whole reference solution.
"""

import re

FINAL = re.compile(r"####\s*(-?[\d.,]*\d)")


def final_number(text: str) -> float | None:
    """The number after the last `####`, or None."""
    found = FINAL.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def reward_fn(messages, answer):
    """1.0 for the right final number, 0.0 for another or none."""
    expected = final_number(answer)
    if expected is None:
        raise ValueError(f"the reference solution has no '#### N': {answer[-60:]!r}")
    return float(final_number(messages[-1]["content"]) == expected)
