"""The callback in real runs of TRL. `make test-trl` runs these in a virtualenv that has TRL."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import novarl
from novarl.cli import main
from novarl.integrations.names import TRL, TRL_HELD_OUT, translate
from novarl.integrations.trl import NovaCallback, attach
from novarl.integrations.trl_logs import divided
from tests.integrations.real import tiny

DERIVED = {"episodes", "groups_kept", "zero_variance_groups"}
PROMPTS = Dataset.from_dict({"prompt": ["write: ", "say: ", "more: ", "again: "] * 6})


def letters(completions: list[str], **columns: Any) -> list[float]:
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def short(completions: list[str], log_extra: Callable[..., None] | None = None, **columns: Any) -> list[float]:
    if log_extra is not None:
        log_extra("characters", [len(text) for text in completions])
    return [1.0 / (1 + len(text)) for text in completions]


def online(tmp_path: Path, trainer: Any = GRPOTrainer, config: Any = GRPOConfig, **more: Any) -> Any:
    settings = {"num_generations": 4, "max_completion_length": 12, **tiny.SETTINGS, **more}
    return trainer(
        model=tiny.save(tmp_path / "model"),
        reward_funcs=[letters, short],
        args=config(output_dir=str(tmp_path / "out"), **settings),
        train_dataset=PROMPTS,
        eval_dataset=PROMPTS.select(range(4)) if "eval_steps" in settings else None,
        processing_class=tiny.tokenizer(),
    )


def watched(trainer: Any, tmp_path: Path) -> tuple[novarl.LoadedRun, NovaCallback]:
    callback = NovaCallback(tmp_path / "run")
    trainer.add_callback(callback)
    trainer.train()
    assert callback.failure is None
    return novarl.load_run(callback.path), callback


def assert_the_metrics_are_trl_s(run: novarl.LoadedRun, trainer: Any, kind: str) -> None:
    wanted: dict[int, dict[str, float]] = {}
    for log in trainer.state.log_history:
        parts = divided(log)
        for values, table in ((parts.training, TRL), (parts.held_out, TRL_HELD_OUT)):
            found = translate(values, table, "trl", kind, trainer.args.to_dict())
            assert not found.refused
            if found.metrics:
                wanted[log["step"]] = wanted.get(log["step"], {}) | found.metrics
    written = {row["step"]: row for row in run.metrics}
    assert len(written) == len(run.metrics) and list(written) == sorted(wanted)
    for step, metrics in wanted.items():
        mine = {name: value for name, value in written[step].items() if name not in ("schema", "phase", "step")}
        assert {name: value for name, value in mine.items() if name not in DERIVED} == metrics


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.04, "gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
        {"gradient_accumulation_steps": 1, "steps_per_generation": 2},
        {"num_iterations": 2, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4},
    ],
)
def test_grpo(settings: dict[str, Any], tmp_path: Path) -> None:
    trainer = online(tmp_path, log_completions=True, **settings)
    run, _ = watched(trainer, tmp_path)
    assert_the_metrics_are_trl_s(run, trainer, "grpo")
    assert (run.summary or {})["status"] == "done" and (run.summary or {})["steps"] == 3
    assert run.manifest["writer"].startswith("trl 1.16") and run.config["trainer"] == "GRPOTrainer"
    assert run.config["learning_rate"] == 1e-3 and not any("hub_token" in name for name in run.config)
    assert run.steps(), "no answers were recorded"
    for step in run.steps():
        rows = run.rollouts(step)
        assert [row.index for row in rows] == [0, 1, 2, 3] * (len(rows) // 4)
        for row in rows:
            assert row.reward == pytest.approx(sum(row.rewards.values()), abs=1e-6)
            said = "".join(row.pieces).replace("<end>", "").replace("<pad>", "")
            assert said == row.text.replace("<unknown>", "") or "<unknown>" in said
            assert len(row.pieces) == len(row.advantages) == len(row.tokens) > 0
            trained = bool(row.logp)  # the last steps may end before all answers of a generation are trained on
            assert trained or step > 1
            assert len(row.logp) == len(row.entropy) == len(row.tokens) * trained
            assert all(value <= 1e-6 for value in row.logp) and all(value >= 0 for value in row.entropy)
            assert len(row.ref_logp) == (len(row.tokens) if settings.get("beta") else 0)
            assert row.extra["characters"] == len(row.text)
    if "steps_per_generation" not in settings:
        first, logged = run.rollouts(1), trainer.state.log_history[0]
        assert sum(row.reward or 0.0 for row in first) / len(first) == pytest.approx(logged["reward"], abs=1e-6)
        if settings.get("gradient_accumulation_steps", 1) == 1:  # TRL averages micro-batches, not tokens
            entropy = [value for row in first for value in row.entropy]
            assert sum(entropy) / len(entropy) == pytest.approx(logged["entropy"], abs=1e-5)


def test_what_trl_writes_itself_is_imported_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = online(tmp_path, log_completions=True)
    run, _ = watched(trainer, tmp_path)
    trainer.save_state()
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "imported")]) == 0
    shown = capsys.readouterr().out
    assert "3 Parquet files: 12 answers, steps 1 to 3" in shown and "extra" in shown and "absent" in shown
    imported = novarl.load_run(tmp_path / "imported")
    for mine, theirs in zip(run.metrics, imported.metrics, strict=True):
        both = set(mine) & set(theirs)
        assert {name: mine[name] for name in both} == {name: theirs[name] for name in both} and "reward_mean" in both
    for step in run.steps():
        for mine_, theirs_ in zip(run.rollouts(step), imported.rollouts(step), strict=True):
            assert (mine_.text, mine_.prompt, mine_.rewards) == (theirs_.text, theirs_.prompt, theirs_.rewards)
            assert theirs_.reward == pytest.approx(mine_.reward)
            assert theirs_.extra["advantage"] == mine_.advantages[0]


def test_conversations_and_rloo(tmp_path: Path) -> None:
    def said(completions: list[list[dict[str, str]]], **columns: Any) -> list[float | None]:
        texts = [completion[-1]["content"] for completion in completions]
        return [None if place == 0 else len(text) / 10 for place, text in enumerate(texts)]

    asked = [[{"role": "system", "content": "be short"}, {"role": "user", "content": word}] for word in ("hi", "ho")]
    trainer = RLOOTrainer(
        model=tiny.save(tmp_path / "model"),
        reward_funcs=said,
        args=RLOOConfig(
            output_dir=str(tmp_path / "out"),
            **{"num_generations": 2, "max_completion_length": 8, "beta": 0.05, **tiny.SETTINGS},
        ),
        train_dataset=Dataset.from_dict({"prompt": asked * 8}),
        processing_class=tiny.tokenizer(),
    )
    run, _ = watched(trainer, tmp_path)
    assert_the_metrics_are_trl_s(run, trainer, "rloo")
    rows = run.rollouts(1)
    assert [message["role"] for message in rows[0].messages] == ["system", "user", "assistant"]
    assert rows[0].reward is None and rows[0].rewards == {"said": None} and rows[1].reward is not None
    assert rows[0].prompt in ("hi", "ho") and rows[0].logp and {row.group for row in rows} == {0, 1}


def test_sft(tmp_path: Path) -> None:
    trainer = SFTTrainer(
        model=tiny.save(tmp_path / "model"),
        args=SFTConfig(
            output_dir=str(tmp_path / "out"), eval_strategy="steps", eval_steps=2, max_length=64, **tiny.SETTINGS
        ),
        train_dataset=Dataset.from_dict({"text": ["abc abc abc", "hello there"] * 8}),
        eval_dataset=Dataset.from_dict({"text": ["abc", "there"]}),
        processing_class=tiny.tokenizer(),
    )
    run, _ = watched(trainer, tmp_path)
    assert_the_metrics_are_trl_s(run, trainer, "sft")
    assert run.manifest["kind"] == "sft" and run.steps() == []
    assert run.metrics.series("loss") and run.metrics.series("accuracy") and run.metrics.series("eval_loss")
    kinds = [event["kind"] for event in run.events]
    assert kinds[:2] == ["start", "phase"] and kinds.count("eval") == 2 and kinds.count("save") == 2


def preferences() -> Dataset:
    pairs = {"prompt": ["a: ", "b: "] * 8, "chosen": ["good", "fine"] * 8, "rejected": ["bad", "ill"] * 8}
    return Dataset.from_dict(pairs)


def test_dpo(tmp_path: Path) -> None:
    trainer = DPOTrainer(
        model=tiny.save(tmp_path / "model"),
        args=DPOConfig(output_dir=str(tmp_path / "out"), max_length=64, **tiny.SETTINGS),
        train_dataset=preferences(),
        processing_class=tiny.tokenizer(),
    )
    run, _ = watched(trainer, tmp_path)
    assert_the_metrics_are_trl_s(run, trainer, "dpo")
    assert run.manifest["kind"] == "dpo" and run.metrics.series("loss")[0] == pytest.approx(math.log(2), abs=1e-4)
    assert run.metrics.series("reward_margin") and run.metrics.series("preference_accuracy")


def test_reward(tmp_path: Path) -> None:
    trainer = RewardTrainer(
        model=tiny.save(tmp_path / "model", reward=True),
        args=RewardConfig(output_dir=str(tmp_path / "out"), max_length=64, **tiny.SETTINGS),
        train_dataset=preferences(),
        processing_class=tiny.tokenizer(),
    )
    run, _ = watched(trainer, tmp_path)
    assert_the_metrics_are_trl_s(run, trainer, "reward")
    assert run.manifest["kind"] == "rm" and run.metrics.series("preference_accuracy")


def weights(trainer: Any) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in trainer.model.parameters()]


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    plain = online(tmp_path, beta=0.04)
    plain.train()
    seen = online(tmp_path, beta=0.04)
    watched(seen, tmp_path)
    assert weights(plain) == weights(seen)
    assert "_generate_and_score_completions" not in vars(seen), "the trainer's method was not given back"


def test_a_failure_is_reported_once_and_training_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = online(tmp_path)
    callback = attach(trainer, tmp_path / "run")
    generate = trainer._generate_and_score_completions

    def lost(inputs: Any) -> Any:
        batch = generate(inputs)
        trainer._logs["advantages"] = None  # what another version of TRL may not have
        return batch

    trainer._generate_and_score_completions = lost
    with pytest.raises(Exception, match="extend"):  # TRL's own code needs it too, at the next generation
        trainer.train()
    shown = capsys.readouterr().err
    assert shown.count("training goes on, and nothing more is written") == 1 and callback.failure is not None


def test_a_full_disk_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = online(tmp_path)
    monkeypatch.setattr("novarl.observe.writer.RunWriter.rollouts", full)
    callback = attach(trainer, tmp_path / "run")
    trainer.train()
    assert trainer.state.global_step == 3 and isinstance(callback.failure, OSError)
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert "_generate_and_score_completions" not in vars(trainer)


def test_a_second_run_and_a_resumed_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = watched(online(tmp_path), tmp_path)
    again, _ = watched(online(tmp_path), tmp_path)
    assert again.path.name == "run-2" and "already holds a run" in capsys.readouterr().err
    trainer = online(tmp_path)
    callback = attach(trainer, tmp_path / "run")
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert callback.path == first.path and callback.failure is None
    assert [row["step"] for row in first.metrics] == [1, 2, 3] and first.steps() == [1, 2, 3]
    lines = (first.path / "rollouts" / "step-000003.jsonl").read_text().splitlines()
    assert len(lines) == 4 and all("columns" in json.loads(line) for line in lines)


def test_answers_of_some_steps(tmp_path: Path) -> None:
    trainer = online(tmp_path)
    trainer.add_callback(NovaCallback(tmp_path / "run", rollouts_every=2))
    trainer.train()
    run = novarl.load_run(tmp_path / "run")
    assert run.steps() == [1, 2] and run.metrics.series("episodes") == [4.0, 4.0, 4.0]


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "examples" / "trl_integration.py"
    spec = importlib.util.spec_from_file_location("trl_integration", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr("sys.argv", ["trl_integration.py", str(tmp_path / "run")])
    example.main()
    assert "20 lines of metrics, answers of 20 steps" in capsys.readouterr().out
    rewards = novarl.load_run(tmp_path / "run").metrics.series("reward_mean")
    assert rewards[-1] > rewards[0] + 0.2


def test_two_processes(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "trl_integration.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*launch, str(example), str(tmp_path / "run")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "nothing more is written" not in done.stderr, done.stderr
    run = novarl.load_run(tmp_path / "run")
    assert run.manifest["processes"] == 2 and len(run.metrics) == 20 and len(list(tmp_path.iterdir())) == 1
    rows = run.rollouts(2)
    assert [row.group for row in rows] == [0] * 8 + [1] * 8 and all(row.reward is not None for row in rows)
    assert [bool(row.logp) for row in rows] == [True] * 8 + [False] * 8, "the tokens of the first process"
    assert all("advantage" in row.extra for row in rows[8:])
    mean = sum(row.reward or 0.0 for row in rows) / len(rows)
    assert run.metrics.series("reward_mean")[1] == pytest.approx(mean, abs=1e-6)
