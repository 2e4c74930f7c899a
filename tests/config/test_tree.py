"""The trees: what they hold, that they are frozen, and that what they write is read back."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from novarl.config.base import Config
from novarl.config.keys import keys, sections
from novarl.config.load import fill, load, to_dict, to_yaml
from novarl.config.parts import BUILT_IN_REWARDS
from novarl.config.preference import DPOConfig, RMConfig
from novarl.config.tree import TREES, EvalConfig, RLConfig, SampleConfig, SFTConfig
from novarl.core.errors import NovaError
from novarl.rewards.registry import REWARDS
from novarl.rewards.user_file import DEFAULT_NAME

SMALLEST: dict[type[Config], list[str]] = {
    RLConfig: ["task=sort"],
    SFTConfig: ["task=sort"],
    DPOConfig: ["task=sort"],
    RMConfig: ["task=sort"],
    EvalConfig: ["task=sort", "model=tiny"],
    SampleConfig: ["model=tiny"],
}
SCRIPTS_RELY_ON = {
    *("task", "data", "model", "algo", "reward", "steps", "seed", "run_dir", "resume", "save_every", "eval_every"),
    *("warmup", "threads", "device", "dtype"),
}


def test_the_keys_that_scripts_rely_on_are_top_level() -> None:
    assert set(keys(RLConfig)) >= SCRIPTS_RELY_ON
    assert SCRIPTS_RELY_ON - {"algo", "reward", "warmup"} <= set(keys(SFTConfig))


@pytest.mark.parametrize("tree", TREES.values())
def test_every_leaf_is_explained_and_its_default_is_valid(tree: type[Config]) -> None:
    for key in keys(tree).values():
        assert len(key.meaning) > 3, f"{key.path} says nothing of itself"
    values = to_dict(load(tree, overrides=SMALLEST[tree]))
    del values["kind"]
    for path in keys(tree):
        found = values
        for part in path.split("."):
            found = found[part]


def test_leaves_are_the_dotted_paths_and_sections_the_groups() -> None:
    assert {"optim.lr", "rollout.max_tokens", "reward", "task_options"} <= set(keys(RLConfig))
    assert not sections(RLConfig) & set(keys(RLConfig))
    assert "optim" in sections(RLConfig) and "rollout" not in sections(SFTConfig)


def test_a_tree_is_frozen() -> None:
    config = load(RLConfig, overrides=["task=sort"])
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.optim.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("tree", TREES.values())
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_what_is_written_is_read_back(tree: type[Config], suffix: str, tmp_path: Path) -> None:
    odd = {"model": "1e5", "dtype": "bfloat16", "seed": 2**63 - 1}
    more = ["rollout.stop=[no, '1', 'ü\\n']", "reward=a.py:b", "task_options.x=1e-5", "optim.lr=1e-5", "run_dir=null"]
    config = load(tree, overrides=SMALLEST[tree] + (more if tree is RLConfig else []), preset=odd)
    text = to_yaml(config)
    if suffix == "json":
        text = __import__("json").dumps(to_dict(config))
    file = tmp_path / f"config.{suffix}"
    file.write_text(text, encoding="utf-8")
    assert load(tree, file) == config


@pytest.mark.parametrize(
    ("reward", "name"), [("folder.d/a.py", DEFAULT_NAME), ("folder.d/a.py:b", "b"), ("length", "length")]
)
def test_a_reward_has_a_name_that_can_be_read_back(reward: str, name: str, tmp_path: Path) -> None:
    config = load(RLConfig, overrides=["task=sort", f"reward={reward}"])
    assert list(config.reward or {}) == [name]
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load(RLConfig, file) == config


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load(SFTConfig, overrides=["task=sort"])))
    with pytest.raises(NovaError, match=r"kind is 'sft', but the command is novarl rl \(run novarl sft\)"):
        load(RLConfig, file)


def test_fill_puts_in_what_was_null_and_nothing_else() -> None:
    config = load(RLConfig, overrides=["task=sort", "kl.coef=0.5", "reward=length"])
    filled = fill(config, {"optim.lr": 0.5, "kl.type": "loss", "adv.estimator": "group"})
    assert (filled.optim.lr, filled.kl.type, filled.kl.coef, filled.adv.estimator) == (0.5, "loss", 0.5, "group")
    assert fill(config, {}) == config
    with pytest.raises(NovaError, match="zero expected gradient"):
        fill(config, {"kl.type": "loss", "kl.estimator": "k1"})


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (["reward=math"], {"math": {}}),
        (["reward=math", "reward.math.tolerance=0.01"], {"math": {"tolerance": 0.01}}),
        (["reward.length.shortest=3", "reward.length.longest=0"], {"length": {"shortest": 3, "longest": 0}}),
        (["reward={a: {source: math, tolerance: 0.5}, length: {weight: 2}}"], {"a": {"tolerance": 0.5}, "length": {}}),
    ],
)
def test_built_in_rewards_have_options(overrides: list[str], options: dict[str, dict[str, Any]]) -> None:
    reward = load(RLConfig, overrides=["task=sort", *overrides]).reward
    assert reward is not None
    assert {name: spec.options for name, spec in reward.items()} == options


def test_the_configuration_knows_every_built_in_reward() -> None:
    assert list(BUILT_IN_REWARDS) == list(REWARDS)
    for name, options in BUILT_IN_REWARDS.items():
        made = inspect.signature(REWARDS[name]).parameters
        assert set(options) == set(made) - {"time_limit"}, name


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reward.length.tolerance=1", "tolerance is an option of reward math, but reward.length.source is length"),
        ("reward={mine: {source: 'f.py:g', longest: 3}}", "longest is an option of reward length, but"),
        ("reward.math.tolerance=-1", "reward.math.tolerance: must be at least 0"),
        ("reward.style.weight=2", "reward.style.source: is required"),
    ],
)
def test_an_option_of_another_reward_is_refused(override: str, said: str) -> None:
    with pytest.raises(NovaError, match=re.escape(said)):
        load(RLConfig, overrides=["task=sort", override])


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("reward=length", {"length": ("length", 1.0)}),
        ("reward=my/file.py:style", {"style": ("my/file.py:style", 1.0)}),
        ("reward={a: length, b: {source: 'f.py:g', weight: -0.5}}", {"a": ("length", 1.0), "b": ("f.py:g", -0.5)}),
    ],
)
def test_rewards_come_by_name_however_they_are_written(override: str, names: dict[str, tuple[str, float]]) -> None:
    reward = load(RLConfig, overrides=["task=sort", override]).reward
    assert reward is not None
    assert {name: (spec.source, spec.weight) for name, spec in reward.items()} == names
