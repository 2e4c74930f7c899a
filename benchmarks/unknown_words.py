"""The fourth part of gold in `make bench-rm-ppo`: what is not a word of the task's demonstrations costs 1 each."""

from collections.abc import Mapping, Sequence
from typing import Any

from novarl.rewards.lexical import words
from novarl.tasks.registry import find_task

KNOWN = {
    word
    for row in find_task("sentiment").demonstrations(3000)
    for turn in row["messages"]
    for word in words(turn["content"])
}


def unknown_words(messages: Sequence[Mapping[str, Any]], answer: Any) -> float:
    """Minus the number of words of the answer that no demonstration has."""
    return -float(sum(word not in KNOWN for word in words(str(messages[-1]["content"]))))
