"""Partial credit for `task=sort`, so that rewards vary from the first step: the share of the letters that are there."""


def reward_fn(messages, answer):
    """How many of the answer's letters the response holds, as a share."""
    return sum(letter in messages[-1]["content"] for letter in answer) / len(answer)
