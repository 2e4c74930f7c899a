"""The benchmark that runs recipes beside the library tells the library what the recipe's arguments say, and its verdict
can be no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.recipe_rewards import richness, sorted_letters
from benchmarks.recipe_twins import TWINS, Twin
from benchmarks.recipes import broken, judge
from novarl.compose.preference_plan import resolve_dpo, resolve_rm
from novarl.compose.resolve import resolve_rl, resolve_sft
from novarl.config.load import load
from novarl.config.tree import TREES
from tests.recipes.world import NAMES, arguments, recipe


def by_name(name: str) -> Twin:
    return next(twin for twin in TWINS if twin.recipe == name)


def config_of(twin: Twin, folder: Path, **changes: Any) -> tuple[Any, Any]:
    """(the recipe's arguments, some changed; the library's configuration, as read from a file)."""
    args = arguments(
        twin.recipe, **(vars(recipe(twin.recipe).parse_args(f"{twin.flags} {twin.task}".split())) | changes)
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"kind": twin.command, "data": "rows.jsonl", **twin.settings(args)}))
    return args, load(TREES[twin.command], path)


def test_every_recipe_has_a_twin() -> None:
    assert sorted(twin.recipe for twin in TWINS) == sorted(NAMES)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.recipe)
def test_the_library_is_told_the_recipes_arguments(twin: Twin, tmp_path: Path) -> None:
    args, config = config_of(twin, tmp_path, learning_rate=0.0123, grad_clip=0.7, batch_size=12)
    assert (config.optim.lr, config.optim.max_grad_norm, config.optim.betas) == (0.0123, 0.7, (0.9, 0.999))
    resolve: dict[str, Any] = {"rl": resolve_rl, "sft": resolve_sft, "dpo": resolve_dpo, "rm": resolve_rm}
    assert resolve[twin.command](config).lr == 0.0123
    if twin.command == "rl":
        assert (config.prompts_per_rollout, config.responses_per_prompt) == (12, getattr(args, "group_size", 1))
    else:
        assert config.batch_size == 12


@pytest.mark.parametrize("name", ["grpo", "ppo", "vineppo", "prime"])
def test_clip_and_updates_are_the_recipes(name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"clip": 0.15, "updates_per_batch": 3, "temperature": 0.9, "max_new_tokens": 9}
    _, config = config_of(by_name(name), tmp_path, **changes)
    plan = resolve_rl(config)
    assert (plan.algorithm.options["clip.low"], plan.algorithm.options["clip.high"]) == (0.15, 0.15)
    assert (plan.algorithm.updates_per_rollout, config.epochs_per_rollout) == (3, 3), "each on the whole batch"
    assert (config.rollout.temperature, plan.max_tokens) == (0.9, 9)


def test_what_only_one_recipe_has(tmp_path: Path) -> None:
    _, ppo = config_of(by_name("ppo"), tmp_path, kl_coef=0.2, lam=0.5, gamma=0.9, critic_learning_rate=0.004)
    row = resolve_rl(ppo).algorithm
    assert (row.kl_coef, resolve_rl(ppo).critic_lr) == (0.2, 0.004)
    assert (row.options["adv.lam"], row.options["adv.gamma"]) == (0.5, 0.9)
    _, vine = config_of(by_name("vineppo"), tmp_path, continuations=5)
    assert (vine.vine.samples, resolve_rl(vine).split) == (5, ""), "every token's end"
    _, vine = config_of(by_name("vineppo"), tmp_path, step_end=", ")
    assert resolve_rl(vine).split == ", "
    _, prime = config_of(by_name("prime"), tmp_path, beta=0.3, reward_learning_rate=0.002)
    assert (prime.prime.beta, resolve_rl(prime).prime_lr) == (0.3, 0.002)
    _, pairs = config_of(by_name("dpo"), tmp_path, beta=0.3, num_epochs=7)
    assert (resolve_dpo(pairs).beta, pairs.epochs) == (0.3, 7.0)
    _, scored = config_of(by_name("reward_model"), tmp_path, centring=0.2)
    assert scored.centring == 0.2


@pytest.mark.parametrize("text", ["", "stone", "Don't STOP, 2 don't", "red red fish, blue bird one two three four"])
def test_rewards_are_the_recipes(text: str) -> None:
    asked = recipe("rloo").topics("test", arguments("rloo"))[0]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
    assert richness(messages, None) == pytest.approx(recipe("rloo").reward(text, arguments("rloo")), abs=1e-12)
    assert sorted_letters(messages, "stone") == recipe("grpo").reward(text, "stone")


def runs(recipe: tuple[float, ...], library: tuple[float, ...], fault: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"seed": 0, "who": "fault", "score": fault}]
    for who, scores in (("recipe", recipe), ("library", library)):
        found += [{"seed": seed, "who": who, "score": score, "before": 0.1} for seed, score in enumerate(scores)]
    return found


def test_the_verdict_can_be_no() -> None:
    grpo = by_name("grpo")
    assert judge(grpo, runs((0.90, 0.94, 0.92), (0.93, 0.91, 0.93), 0.06))["met"]
    assert not judge(grpo, runs((0.90, 0.94, 0.92), (0.80, 0.84, 0.82), 0.06))["met"], "another score"
    assert not judge(grpo, runs((0.90, 0.94, 0.92), (0.93, 0.60, 0.95), 0.06))["met"], "an interval that says nothing"
    assert not judge(grpo, runs((0.90, 0.94, 0.92), (0.93, 0.91, 0.93), 0.85))["met"], "the fault passes too"
    assert judge(grpo, runs((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), 0.06))["met"]


def test_broken_data_differ_in_every_row() -> None:
    pair = {"prompt": [], "chosen": ["good"], "rejected": ["bad"]}
    assert broken([pair]) == [{"prompt": [], "chosen": ["bad"], "rejected": ["good"]}]
    lessons = [{"messages": [question, answer]} for question, answer in ("aA", "bB", "cC")]
    assert [row["messages"] for row in broken(lessons)] == [["a", "B"], ["b", "C"], ["c", "A"]]
