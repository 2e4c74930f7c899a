"""What a configuration comes to, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from novarl.compose.resolve import other_algorithm, resolve_rl
from novarl.config.load import load
from novarl.config.tree import RLConfig
from novarl.core.errors import NovaError

COMPARED: dict[str, tuple[dict[str, Any], str | None]] = {
    "as it is": ({}, "grpo"),
    "grpo": ({"algo": "grpo"}, "rloo"),
    "one answer to a prompt": ({"algo": "reinforce", "responses_per_prompt": 1}, "ppo"),
    "a critic's settings": ({"algo": "ppo", "critic": {"clip": 0.2}}, None),
    "continuations": ({"algo": "vineppo", "vine": {"samples": 2}}, None),
    "process rewards": ({"algo": "prime", "prime": {"lr": 1e-3}}, None),
}


@pytest.mark.parametrize(("settings", "other"), COMPARED.values(), ids=COMPARED)
def test_the_algorithm_to_compare_with_takes_the_same_settings(settings: dict[str, Any], other: str | None) -> None:
    config = RLConfig.model_validate({"task": "sort", **settings})
    assert other_algorithm(config) == other
    if other is not None:
        resolve_rl(config.model_copy(update={"algo": other}))


def test_a_part_of_a_reward_may_be_an_objective_and_the_part_of_none_may_not() -> None:
    rewards = ["task=sort", "reward={r: {source: mine.py:f}}", "multi_objective.enabled=true"]

    def resolved(name: str) -> object:
        objectives = f'multi_objective.objectives={{"{name}": {{direction: max}}, length: {{direction: min}}}}'
        return resolve_rl(load(RLConfig, None, [*rewards, objectives]))

    assert resolved("r/b")
    for name in ("q/b", "r/"):
        with pytest.raises(NovaError, match="no reward or measurement"):
            resolved(name)
