"""The contract of OpenRLHF's loggers: calls as OpenRLHF 0.11's trainer makes them, with its names."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

import novarl
from novarl.core.errors import NovaError
from novarl.integrations.openrlhf import NovaLogger, replace_logger

STEP = {
    "policy_loss": -0.01,
    "kl": 0.02,
    "logprobs_diff": 0.01,
    "ppo_clip_ratio": 0.1,
    "ppo_kl": 0.001,
    "vllm_kl": 0.0005,
    "reward": 0.5,
    "return": 0.49,
    "group_reward_std": 0.3,
    "response_length": 120.0,
    "total_length": 200.0,
    "response_clip_ratio": 0.05,
    "actor_lr": 1e-6,
    "actor_grad_norm": 0.7,
    "critic_loss": 0.2,
    "values": 0.4,
    "critic_lr": 9e-6,
    "critic_grad_norm": 1.5,
    "timing/make_experience": 3.0,
    "timing/ppo_train": 9.0,
    "timing/broadcast": 1.0,
    "timing/generation": 20.0,
    "timing/step_total": 33.0,
    "rollout/reward_mean": 0.51,
    "rollout/reward_std": 0.5,
    "rollout/response_length_mean": 121.0,
    "rollout/truncated_rate": 0.04,
    "rollout/num_samples": 64.0,
    "generated_samples": ["question answer", 1.0],
}


def test_a_run(tmp_path: Path) -> None:
    settings = Namespace(actor=Namespace(lr=1e-6), logger=Namespace(wandb=Namespace(key="secret", project="p")))
    logger = NovaLogger(tmp_path / "run", settings)
    logs = dict(STEP)
    logger.log_train(1, logs)
    logger.log_eval(1, {"eval_math_pass1": 0.25, "eval_response_length_mean": 90.0})
    logger.log_train(2, STEP | {"reward": None, "odd": "text"})
    logger.close()
    logger.close()
    assert logger.failure is None and logs == STEP, "the trainer's own dictionary stays as it was"

    run = novarl.load_run(tmp_path / "run")
    first, second = run.metrics
    assert first["clip_fraction"] == 0.1 and first["reward_mean"] == 0.51 and first["reward"] == 0.5
    assert first["length_mean"] == 121.0 and first["episodes"] == 64.0 and first["truncated_fraction"] == 0.04
    assert first["grad_norm"] == 0.7 and first["lr"] == 1e-6 and first["value_loss"] == 0.2
    assert first["openrlhf/kl"] == 0.02 and first["ppo_kl"] == 0.001 and first["vllm_kl"] == 0.0005
    assert first["time/make_experience_s"] == 3.0 and first["return"] == 0.49
    assert first["eval_math_pass1"] == 0.25 and "eval_math_pass1" not in second and "reward" not in second
    assert run.config == {"actor": {"lr": 1e-6}, "logger": {"wandb": {"project": "p"}}}
    events = {event["kind"]: event for event in run.events}
    assert events["sample"]["text"] == "question answer" and events["eval"]["metrics"]["eval_math_pass1"] == 0.25
    assert "odd" in events["alert"]["message"]
    assert run.summary == {"status": "done", "steps": 2, "writer": "openrlhf"}


def test_every_number_of_a_step_is_written(tmp_path: Path) -> None:
    logger = NovaLogger(tmp_path / "run")
    logger.log_train(1, STEP)
    logger.close()
    (row,) = novarl.load_run(tmp_path / "run").metrics
    numbers = [value for value in STEP.values() if isinstance(value, float)]
    assert sorted(value for name, value in row.items() if name not in ("schema", "phase", "step")) == sorted(numbers)


def test_a_failure_does_not_stop_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = NovaLogger(tmp_path / "run")
    logger.log_train("not a step", STEP)  # type: ignore[arg-type]
    logger.log_train(1, STEP)
    logger.close()
    assert isinstance(logger.failure, ValueError)
    assert capsys.readouterr().err.count("training goes on") == 1
    assert len(novarl.load_run(tmp_path / "run").metrics) == 0


def test_a_directory_with_a_run_is_refused_before_training(tmp_path: Path) -> None:
    NovaLogger(tmp_path / "run").close()
    with pytest.raises(NovaError, match="already holds a run"):
        NovaLogger(tmp_path / "run")
    NovaLogger(tmp_path / "run", extend=True).close()


def test_the_logger_takes_the_place_of_tensorboard(tmp_path: Path) -> None:
    module = SimpleNamespace(TensorboardLogger=None)
    replace_logger(tmp_path / "run", module)
    logger = module.TensorboardLogger(Namespace(seed=1))
    assert isinstance(logger, NovaLogger) and novarl.load_run(tmp_path / "run").config == {"seed": 1}
    with pytest.raises(NovaError, match="openrlhf cannot be imported"):
        replace_logger(tmp_path / "run")
