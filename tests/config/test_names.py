"""Other libraries' names: every row of every table does what docs/names.md says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from novarl.config.base import Config
from novarl.config.foreign.aliases import KL_PLACES, VALUES
from novarl.config.foreign.rows import Alias, Fixed
from novarl.config.foreign.tables import rows
from novarl.config.keys import is_key, keys, nearest
from novarl.config.load import load
from novarl.config.names import meanings, single
from novarl.config.names_page import page
from novarl.config.preference import DPOConfig, RMConfig
from novarl.config.tree import TREES, EvalConfig, RLConfig, SampleConfig, SFTConfig
from novarl.core.errors import NovaError

PROMISED = {
    *("prompts_per_rollout", "responses_per_prompt", "batch_size", "max_length", "max_new_tokens", "rollout.env_path"),
    *("kl.coef", "kl.type", "kl.reward_estimator", "kl.loss_estimator", "adv.estimator", "adv.norm_var", "lamda"),
    *("clip_range", "kl_coef", "actor.rollout.env_path", "update_per_rollout", "actor.lr", "actor.clip", "reward_fn"),
    *("rollout.train_sampling_params.temperature", "learning_rate", "epochs", "steps_per_epoch", "rollout.max_turns"),
    *("baseline", "adv.baseline", "ema_beta", "group_size", "brevity_penalty_scale", "model_id"),
}
BASE: dict[type[Config], dict[str, Any]] = {
    RLConfig: {
        **{"data": "base", "reward": "length", "run_dir": "base", "rollout": {"env_path": "base.py"}},
        "constraint_optimization": {"kl_constraint": 0.5},
        "optim": {"schedule": "linear"},
    },
    SFTConfig: {"data": "base", "run_dir": "base", "optim": {"schedule": "linear"}},
    DPOConfig: {"data": "base", "run_dir": "base", "optim": {"schedule": "linear"}},
    RMConfig: {"data": "base", "run_dir": "base", "optim": {"schedule": "linear"}},
    EvalConfig: {"data": "base", "reward": "length", "model": "base", "rollout": {"env_path": "base.py"}},
    SampleConfig: {"model": "base"},
}


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Config]:
    """The base of a tree with a file of changes; on a task where these speak of one."""

    def load_changed(tree: type[Config], changes: dict[str, Any]) -> Config:
        of_task = any(name.startswith(("task_options", "brevity")) for name in changes)
        file = tmp_path / "changes.json"
        file.write_text(json.dumps(changes | ({"task": "lexical", "data": None} if of_task else {"threads": 1})))
        return load(tree, file, preset=BASE[tree])

    return load_changed


ALIASES = [row for row in rows() if isinstance(row, Alias)]
FIXED = [row for row in rows() if isinstance(row, Fixed)]
ALL = [(tree, alias) for tree in TREES.values() for alias in ALIASES if single(tree, Alias).get(alias.old) is alias]
CASES = [next(case for case in ALL if case[1] is alias) for alias in ALIASES if any(alias is one for _, one in ALL)]
"""Each alias with the first kind of run that has it."""


@pytest.mark.parametrize(("tree", "alias"), CASES, ids=lambda case: getattr(case, "old", None) or case.kind)
def test_an_alias_sets_the_keys_it_stands_for(tree: type[Config], alias: Alias, changed: Callable[..., Config]) -> None:
    value = alias.values[alias.example] if alias.values else alias.example
    value = alias.convert(value) if alias.convert else value
    beside = {path: values[0] for path, values in alias.needs.items() if path in keys(tree)}
    by_alias = changed(tree, {alias.old: alias.example} | beside)
    set_by = dict(zip(alias.new, value, strict=True)) if alias.each else dict.fromkeys(alias.new, value)
    assert by_alias == changed(tree, set_by | alias.implied(alias.example) | beside)
    assert by_alias != changed(tree, {"task_options": {}} if "task_options" in alias.new[0] else {}), "an idle example"


def test_every_alias_leads_somewhere_in_some_tree() -> None:
    used = [row for tree in TREES.values() for meant in meanings(tree).values() for row in meant]
    assert [alias.old for alias in ALIASES if alias not in used] == []
    for tree in TREES.values():
        for meant in meanings(tree).values():
            assert len({row.source for row in meant}) == len(meant), "one name of one project, two meanings"
            assert len(meant) == 1 or all(row.means for row in meant if isinstance(row, Alias))


def test_every_promised_name_is_known() -> None:
    known = {*keys(RLConfig), *meanings(RLConfig), "epochs", "steps_per_epoch"}
    known |= {f"kl.{name}" for name in KL_PLACES}
    assert known >= PROMISED
    text = page()
    assert [name for name in sorted(PROMISED) if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("key", "old", "new"), [(key, old, new) for key, row in VALUES.items() for old, new in row.items()]
)
def test_another_name_of_a_value(key: str, old: str, new: Any) -> None:
    preset = {"task": "sort", "run_dir": "runs/x"}
    assert load(RLConfig, preset=preset, overrides=[f"{key}={old}"]) == load(RLConfig, preset=preset | {key: new})


@pytest.mark.parametrize("row", FIXED, ids=lambda row: row.old)
def test_a_fixed_name_changes_nothing_and_takes_nothing_else(row: Fixed) -> None:
    for tree in map(TREES.__getitem__, row.commands):
        plain = load(tree, overrides=["task=sort"])
        for value in row.values:
            assert load(tree, preset={"task": "sort", row.old: value}) == plain
        for other in {0.5, not row.values[0], "other"} - set(row.values):
            with pytest.raises(NovaError, match=r"is not supported: "):
                load(tree, preset={"task": "sort", row.old: other})


@pytest.mark.parametrize("name", ["adaptive_kl", "actor.kl.adaptive_kl", "kl.adaptive_kl", "dynamic_sampling"])
def test_a_section_can_be_switched_on_by_its_name(name: str, tmp_path: Path) -> None:
    """NovaRL's document writes `adaptive_kl=True`."""
    section = name.rpartition(".")[2]
    assert getattr(load(RLConfig, overrides=["task=sort", f"{name}=true"]), section).enabled is True
    file = tmp_path / "c.yaml"
    file.write_text(f"task: sort\n{section}: false\n")
    assert getattr(load(RLConfig, file), section).enabled is False
    with pytest.raises(NovaError, match="a section, not a key"):
        load(RLConfig, overrides=["task=sort", "optim=true"])


OBJECTIVES = {"reward": ("max", 1.0), "kl": ("min", 0.1), "entropy": ("max", 0.01)}


@pytest.mark.parametrize(
    "text",
    [
        """
  objectives: [reward, kl_penalty, entropy]
  objective_weights: {reward: 1.0, kl_penalty: -0.1, entropy: 0.01}""",
        """
  objective_weights: {reward: 1.0, kl_penalty: -0.1, entropy: 0.01}
  objectives: [reward, kl, entropy]""",
        """
  objectives:
    reward: {direction: max}
    kl_penalty: {direction: min, weight: 0.1}
    entropy: {direction: max, weight: 0.01}""",
    ],
)
def test_the_documents_objectives_have_the_directions_that_everybody_means(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"task: sort\nmulti_objective:\n  enabled: true{text}\n  pareto_method: tchebycheff\n")
    found = load(RLConfig, file).multi_objective
    assert {name: (spec.direction, spec.weight) for name, spec in found.objectives.items()} == OBJECTIVES
    assert (found.enabled, found.method) == (True, "tchebycheff")
    fewer = load(RLConfig, file, ["multi_objective.objectives=[reward]"]).multi_objective
    assert list(fewer.objectives) == ["reward"], "a whole list takes the place of the earlier one"
    heavier = load(RLConfig, file, ["multi_objective.objective_weights={kl_penalty: -3}"]).multi_objective
    assert heavier.objectives["kl"].weight == 3 and len(heavier.objectives) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("multi_objective.objectives=[reward,length]", "the direction of objective 'length' is unknown"),
        ("multi_objective.objectives=[reward,7]", "the direction of objective 7 is unknown"),
        (
            "multi_objective.objectives={right: {weight: 1}}",
            "right: the objective has no direction",
        ),
        (
            "multi_objective.objective_weights={right: 1}",
            "right: the objective has no direction",
        ),
        (
            "multi_objective.objectives=[reward] & multi_objective.objective_weights={reward: -1}",
            "at least 0.0, got -1",
        ),
    ],
)
def test_an_objective_without_a_direction_is_refused(words: str, said: str) -> None:
    with pytest.raises(NovaError) as caught:
        load(RLConfig, overrides=["task=sort", *words.split(" & ")])
    assert said in str(caught.value)


def test_epochs_times_steps_per_epoch_is_steps() -> None:
    assert load(RLConfig, overrides=["task=sort", "epochs=3", "steps_per_epoch=8"]).steps == 24
    for given in (
        ["epochs=3"],
        ["steps_per_epoch=8"],
        ["epochs=0", "steps_per_epoch=8"],
        ["epochs=x", "steps_per_epoch=8"],
    ):
        with pytest.raises(NovaError, match=r"epoch"):
            load(RLConfig, overrides=["task=sort", *given])
    assert load(SFTConfig, overrides=["task=sort", "epochs=3"]).epochs == 3, "a key of its own there"


@pytest.mark.parametrize("part", ["", "actor."])
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"kl.reward_estimator": "k3"}, ("reward", "k3")),
        ({"kl.loss_estimator": "k2"}, ("loss", "k2")),
        ({"kl.type": "loss", "kl.reward_estimator": "k1", "kl.loss_estimator": "k3"}, ("loss", "k3")),
        ({"kl.type": "reward", "kl.reward_estimator": "k1", "kl.loss_estimator": "k3"}, ("reward", "k1")),
        ({"kl.type": None, "kl.reward_estimator": "k1", "kl.loss_estimator": "k2"}, (None, None)),
        ({"kl.type": None, "kl.reward_estimator": "k1"}, (None, None)),
        ({"kl.reward_estimator": "k1", "kl.loss_estimator": "k2"}, (None, None)),
    ],
)
def test_rl2_names_the_kl_estimator_by_its_place(part: str, given: dict[str, Any], found: tuple[Any, Any]) -> None:
    kl = load(RLConfig, preset={"task": "sort", **{part + name: value for name, value in given.items()}}).kl
    assert (kl.type, kl.estimator) == found


def test_an_estimator_for_another_place_is_a_contradiction() -> None:
    with pytest.raises(NovaError, match=r"kl.type=loss does not use it"):
        load(RLConfig, overrides=["task=sort", "kl.type=loss", "kl.reward_estimator=k1"])


def test_kl_coef_enters_the_loss_unless_another_place_is_named() -> None:
    assert load(RLConfig, overrides=["task=sort", "kl_coef=0.1"]).kl.type == "loss"
    assert load(RLConfig, overrides=["task=sort", "kl_coef=0.1", "kl.type=reward"]).kl.type == "reward"
    assert load(RLConfig, overrides=["task=sort", "kl_coef=0"]).kl.type is None


def test_two_names_of_one_key_must_agree_within_one_source(tmp_path: Path) -> None:
    with pytest.raises(NovaError, match=r"kl.coef and kl_coef are both names of kl.coef but"):
        load(RLConfig, overrides=["task=sort", "kl.coef=0.1", "kl_coef=0.2"])
    assert load(RLConfig, overrides=["task=sort", "optim.lr=0.1", "lr=0.1"]).optim.lr == 0.1
    file = tmp_path / "c.yaml"
    file.write_text("task: sort\nlearning_rate: 0.1\n")
    assert load(RLConfig, file, ["optim.lr=0.2"]).optim.lr == 0.2, "a later source wins, under whichever name"


def test_later_values_win(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("steps: 5\nreward: {a: length, b: {source: length, weight: 2}}\n")
    config = load(
        RLConfig, file, ["steps=6", "steps=7", "reward.b.weight=3"], preset={"task": "sort", "steps": 4, "keep": 9}
    )
    assert (config.task, config.steps, config.keep) == ("sort", 7, 9)
    assert config.reward is not None and config.reward["b"].weight == 3
    for whole in (["reward=c"], ["reward={c: x}"], ["reward={c: {source: x}}", "reward.c.weight=2"]):
        instead = load(RLConfig, file, ["task=sort", *whole]).reward
        assert instead is not None and list(instead) == ["c"], "a whole mapping takes the place of the earlier one"


def test_a_whole_rl2_configuration_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "ppo.yaml"
    file.write_text(RL2_CONFIG)
    config = load(RLConfig, file)
    assert (config.data, config.model, config.prompts_per_rollout, config.responses_per_prompt) == (
        "train.jsonl",
        "qwen",
        8,
        4,
    )
    assert (config.rollout.max_tokens, config.rollout.env_path, config.adv.estimator) == (64, "env.py", "group")
    assert (config.optim.lr, config.optim.weight_decay, config.clip.low, config.clip.high) == (1e-6, 1e-2, 0.2, 0.2)
    assert (config.kl.type, config.kl.estimator, config.kl.coef) == ("loss", "k2", 0.01)
    assert (config.dynamic_sampling.enabled, config.eval.data, config.eval_every) == (True, "test.jsonl", None)


def test_the_page_is_what_the_tables_say() -> None:
    written = Path(__file__).parents[2] / "docs" / "names.md"
    assert written.read_text() == page(), "python -m novarl.config.names_page > docs/names.md"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("stepz", "steps"),
        ("lern_rate", "learning_rate"),
        ("optim.learningrate", "learning_rate"),
        ("rollout.maxtokens", "rollout.max_tokens"),
        ("optmi.lr", "optim.lr"),
        ("weight_decays", "optim.weight_decay"),
        ("betas", "optim.betas"),
        ("max_tokens", "micro.max_tokens or rollout.max_tokens"),
        ("adv.normstd", "adv.norm_std"),
        ("roll_out.stop", "rollout.stop"),
    ],
)
def test_the_nearest_name_is_suggested(wrong: str, right: str) -> None:
    with pytest.raises(NovaError) as caught:
        load(RLConfig, overrides=["task=sort", f"{wrong}=1"])
    assert str(caught.value) == f"command line {wrong}: unknown key (did you mean {right}?)"


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert nearest("xyzzy", keys(RLConfig)) is None
    assert is_key("reward.anything.weight", RLConfig) and not is_key("reward.anything", SFTConfig)
    assert "batch_size" in meanings(RLConfig) and "batch_size" not in meanings(SFTConfig)
    assert not single(EvalConfig, Fixed)


RL2_CONFIG = """
data:
  train_data_path: train.jsonl
  test_data_path: test.jsonl
  prompts_per_rollout: 8
  responses_per_prompt: 4
actor:
  model_name: qwen
  gradient_checkpointing: true
  max_length_per_device: 8192
  update_per_rollout: 1
  clip: 0.2
  lr: 1e-6
  weight_decay: 1e-2
  max_grad_norm: 1.0
  save_freq: null
  tis_coef: 0.0
  avg_level: token
  kl:
    coef: 0.01
    type: loss
    reward_estimator: k1
    loss_estimator: k2
  entropy:
    coef: 0.0
rollout:
  apply_chat_template: true
  train_sampling_params:
    temperature: 1.0
    max_new_tokens: 64
  test_sampling_params:
    temperature: 0.0
  max_turns: 1
  env_path: env.py
  dynamic_filtering: true
adv:
  estimator: reinforce
  gamma: 1.0
  lamda: 1.0
  norm_var: false
trainer:
  test_freq: null
"""
