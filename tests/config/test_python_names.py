"""Other libraries' names as keyword arguments: the Python API understands and refuses what the command line does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import novarl
from novarl.compose import configuration
from novarl.config.foreign.rows import Alias
from novarl.config.load import load, to_dict
from novarl.config.names import single
from novarl.config.tree import TREES, RLConfig
from novarl.core.errors import NovaError
from tests.compose.harness import deterministic_metrics, finished, lightly, weights

ALIASES = [(kind, alias) for kind in ("rl", "sft", "dpo", "rm") for alias in single(TREES[kind], Alias).values()]


def said(trainer: Any, **settings: Any) -> str:
    with pytest.raises(NovaError) as caught:
        trainer(model="tiny", **settings)
    return str(caught.value)


def long(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def short(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


@pytest.mark.parametrize(("kind", "alias"), ALIASES, ids=lambda part: getattr(part, "old", part))
def test_a_keyword_argument_means_what_it_means_on_the_command_line(kind: str, alias: Alias) -> None:
    def outcome(make: Any) -> Any:
        try:
            config = make()
        except NovaError as error:
            return error.what, error.fix
        return to_dict(config), config.notes

    settings = {alias.old: alias.example} | {path: values[0] for path, values in alias.needs.items()}
    tree = TREES[kind]
    assert outcome(lambda: configuration(kind, {"task": "sort", **settings}, "novarl")) == outcome(
        lambda: load(tree, preset={"task": "sort", **settings})
    )


def test_a_run_under_trls_names_is_the_run_of_the_command_line(tmp_path: Path) -> None:
    words = {"learning_rate": 3e-3, "num_generations": 2, "max_completion_length": 4, "max_steps": 2, "beta": 0.1}
    words |= {"prompts_per_rollout": 2, "warmup": 2, "eval.n": 2, "logging_steps": 1, "task": "sort"}
    words |= {"log.console": False, "log.tensorboard": False}
    finished("rl", *(f"{name}={value}".lower() for name, value in words.items()), f"run_dir={tmp_path / 'cli'}")
    with lightly():
        novarl.RL(**words, output_dir=str(tmp_path / "api")).run()
    assert deterministic_metrics(tmp_path / "cli") == deterministic_metrics(tmp_path / "api")
    ours, theirs = weights(tmp_path / "api"), weights(tmp_path / "cli")
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lerning_rate": 1e-5}, "novarl.RL lerning_rate: unknown key (did you mean learning_rate?)"),
        ({"num_generation": 4}, "novarl.RL num_generation: unknown key (did you mean num_generations?)"),
        ({"kl": {"coeff": 0.1}}, "novarl.RL kl.coeff: unknown key (did you mean kl.coef?)"),
        ({"per_device_train_batch_size": 4}, "TRL counts completions per device and forward pass"),
        ({"report_to": "comet_ml"}, "report_to (NovaRL: log.trackers)"),
        ({"fp16": True}, "fp16: true is not supported: float16 is not supported"),
        ({"num_train_epochs": 2}, "steps sets the length of an RL run"),
        ({"max_steps": 4, "num_iterations": 2, "num_generations": 4}, "TRL counts optimizer updates"),
        ({"learning_rate": 1e-5, "optim": {"lr": 1e-4}}, "are both names of optim.lr but have different values"),
        ({"num_generations": 2.5}, "num_generations (NovaRL: responses_per_prompt): must be a whole number, got 2.5"),
    ],
)
def test_a_mistake_is_answered_as_on_the_command_line(settings: dict[str, Any], expected: str) -> None:
    assert expected in said(novarl.RL, prompts="sort", **settings)


def test_each_trainer_knows_the_names_of_its_kind() -> None:
    for trainer in (novarl.SFT, novarl.DPO, novarl.RewardModel):
        assert "num_generations: unknown key (only novarl rl has it" in said(trainer, data="sort", num_generations=4)
        assert "did you mean learning_rate?" in said(trainer, data="sort", lerning_rate=1)


def test_functions_are_given_under_trls_names() -> None:
    rows = [{"prompt": str(i)} for i in range(4)]
    config = configuration("rl", {"train_dataset": rows, "reward_funcs": long}, "novarl.RL")
    assert isinstance(config, RLConfig) and config.reward is not None
    assert config.object("data") == rows and config.object("reward.long") is long
    assert {name: spec.weight for name, spec in config.reward.items()} == {"long": 1.0}
    both = {"reward_funcs": [long, short, "length"], "reward_weights": [1.0, 0.5, 2.0]}
    config = configuration("rl", {"train_dataset": rows, **both}, "novarl.RL")
    assert isinstance(config, RLConfig) and config.reward is not None
    assert {name: spec.weight for name, spec in config.reward.items()} == {"long": 1.0, "short": 0.5, "length": 2.0}
    assert config.object("reward.long") is long and config.object("reward.short") is short
    twice = said(novarl.RL, train_dataset=rows, reward_funcs=[long, long])
    assert "must be functions with different names" in twice


def test_a_run_with_trls_trainer_arguments(tmp_path: Path) -> None:
    """`GRPOTrainer(model=..., reward_funcs=..., train_dataset=...)`."""
    rows = [{"prompt": f"What is {i}?"} for i in range(4)]
    small = {"num_generations": 2, "max_completion_length": 4, "max_steps": 1, "prompts_per_rollout": 2}
    with lightly():
        trainer = novarl.RL(
            model="tiny",
            reward_funcs=[long, short],
            reward_weights=[1.0, 0.5],
            train_dataset=rows,
            run_dir=str(tmp_path / "run"),
            log={"console": False, "tensorboard": False},
            **small,
        )
        trainer.run()
    (record,) = deterministic_metrics(tmp_path / "run")
    assert record["step"] == 1 and record["rewards/long_mean"] == -record["rewards/short_mean"] > 0
