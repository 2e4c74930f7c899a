"""A tool of your own: the policy may have one sum computed before it answers.

    novarl rl data=rows.jsonl rollout.env_path=examples/calculator.py rollout.max_turns=2 \
        model=runs/x/checkpoints/latest/model

with rows like {"prompt": "A farmer has 17 hens and buys 25 more.", "answer": "42"}.

`interact(messages)` gets the conversation so far, the policy's last turn at its end, and returns the messages to go on
with; an empty list ends the episode, and so does a turn that is cut off at `rollout.max_tokens` or the last of
`rollout.max_turns`. What it returns is not trained on. Both functions run in a process of their own, with a time limit.
"""

import operator
import re

CALL = re.compile(r"calc\((-?\d{1,12}) ?([-+*]) ?(-?\d{1,12})\)")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def interact(messages):
    """The result of the first `calc(17 + 25)` in the policy's turn; nothing where it calls no tool."""
    call = CALL.search(messages[-1]["content"])
    if call is None:
        return []
    left, sign, right = call.groups()
    return [{"role": "tool", "content": str(OPERATORS[sign](int(left), int(right)))}]


def reward_fn(messages, answer):
    """1 where the last turn ends in the right number."""
    numbers = re.findall(r"-?\d+", messages[-1]["content"])
    return float(messages[-1]["role"] == "assistant" and numbers[-1:] == [str(answer)])
