"""The reward of docs/getting_started.md: 1 for the right answer, 0 for any other.

    novarl rl data=examples/data/rows.jsonl prompt_key=question reward=examples/my_reward.py:reward_fn ...

Parameters are named after what they receive: `completion` is the text of the model's answer, `answer` is that column of
the row. The file runs in a process of its own, with a time limit.
"""


def reward_fn(completion, answer):
    return float(completion.strip() == answer)
