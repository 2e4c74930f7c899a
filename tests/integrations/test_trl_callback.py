"""The callback for TRL, on recorded calls. `make test-trl` does the same in real runs of TRL."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import novarl
from novarl.core.errors import NovaError
from novarl.integrations.trl import NovaCallback, attach
from tests.integrations.fakes import Trainer

NAN = math.nan
STEPS = [
    [("p", "ab", 1.0), ("p", "cd", 0.0), ("q", "jjj", 1.0), ("q", "a", 1.0)],
    [("p", "ab", NAN), ("p", "b", 0.0), ("q", "a", 1.0), ("q", "a", 1.0)],
]


def trained(tmp_path: Path, **more: Any) -> tuple[novarl.LoadedRun, Trainer, NovaCallback]:
    trainer = Trainer(STEPS, **more)
    callback = NovaCallback(tmp_path / "run")
    trainer.add_callback(callback)  # without the trainer, as users do
    trainer.train()
    return novarl.load_run(callback.path), trainer, callback


def test_answers(tmp_path: Path) -> None:
    run, _, callback = trained(tmp_path)
    assert callback.failure is None and run.steps() == [1, 2]
    first = run.rollouts(1)
    assert [(row.group, row.index) for row in first] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row.text for row in first] == ["ab", "cd", "jjj", "a"] and first[0].prompt == "p"
    assert [row.reward for row in first] == [2.5, 0.5, 2.5, 2.5], "the weights are 2 and 1"
    assert first[0].rewards == {"first": 1.0, "second": 0.5} and first[0].extra == {"letters": 2}
    assert first[0].pieces == ("a", "b", "<end>") and first[2].pieces == ("j", "j", "j")
    assert [row.status for row in first] == ["done", "done", "truncated", "done"]
    assert first[1].advantages == (-1.0,) * 3 and first[1].ref_logp == (-1.5, -2.0, -5.5)
    assert first[1].logp == (-1.75, -2.0, -3.75), "of its own row, though TRL trains in another order"
    assert first[1].entropy == (0.375, 0.5, 1.375) and first[3].logp == (-3.25, -5.75)
    second = run.rollouts(2)
    assert second[0].reward is None and second[0].rewards == {"first": None, "second": None}


def test_metrics_events_and_the_rest(tmp_path: Path) -> None:
    run, _, _ = trained(tmp_path)
    first, second = run.metrics
    assert first["total_loss"] == 0.5 and first["kl_mean"] == 0.1 and first["trl/epoch"] == 0.1
    assert (first["episodes"], first["groups_kept"], first["zero_variance_groups"]) == (4, 2, 1)
    assert second["eval_reward"] == 0.25 and second["time/eval_runtime"] == 2.0 and "eval_reward" not in first
    assert [event["kind"] for event in run.events] == ["start", "phase", "alert", "save", "save", "eval"]
    assert "note" in next(event for event in run.events if event["kind"] == "alert")["message"]
    assert (run.summary or {})["status"] == "done" and (run.summary or {})["trl"]["train_loss"] == 0.5
    assert run.config["learning_rate"] == 1e-6 and "hub_token" not in run.config
    assert run.manifest["kind"] == "rl" and run.manifest["seed"] == 42


def test_a_mean_over_several_steps(tmp_path: Path) -> None:
    run, _, _ = trained(tmp_path, every=2)
    (only,) = run.metrics
    assert only["step"] == 2 and only["zero_variance_groups"] == 1.0 and only["episodes"] == 4


def test_the_trainer_gets_its_methods_back(tmp_path: Path) -> None:
    _, trainer, _ = trained(tmp_path)
    assert "_generate_and_score_completions" not in vars(trainer)
    assert "_get_per_token_logps_and_entropies" not in vars(trainer)


@pytest.mark.parametrize("name", ["rewards", "advantages"])
def test_a_version_without_what_is_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(STEPS)
    generate = trainer._generate_and_score_completions

    def other(rows: Any) -> Any:
        found = generate(rows)
        trainer._logs[f"{name} of another version"] = trainer._logs.pop(name)
        return found

    callback = attach(trainer, tmp_path / "run")
    trainer._generate_and_score_completions = other
    with pytest.raises(KeyError):  # the fake trainer, at its second step
        trainer.train()
    assert trainer.state.global_step == 1 and isinstance(callback.failure, KeyError)
    shown = capsys.readouterr().err
    assert shown.count("nothing more is written") == 1 and "Traceback" not in shown


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("novarl.observe.writer.RunWriter.rollouts", full)
    _, trainer, callback = trained(tmp_path)
    assert trainer.state.global_step == 2 and isinstance(callback.failure, OSError)
    assert capsys.readouterr().err.count("No space left") == 1


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    trainer = Trainer(STEPS)
    trainer.state.is_world_process_zero = False
    attach(trainer, tmp_path / "run")
    trainer.train()
    assert not (tmp_path / "run").exists()


def test_answers_of_other_processes_have_no_tokens(tmp_path: Path) -> None:
    trainer = Trainer([[*STEPS[0], *STEPS[0]]])
    generate = trainer._generate_and_score_completions

    def gathered(rows: Any) -> Any:
        found = generate(rows)  # the logs have the answers of both processes, the batch those of this one
        half = len(rows) // 2
        return {name: value[:half] for name, value in found.items()}

    trainer._generate_and_score_completions = gathered
    trainer.accelerator.num_processes = 2
    trainer.add_callback(NovaCallback(tmp_path / "run"))
    trainer.call("on_train_begin")
    trainer.call("on_step_begin")
    trainer._generate_and_score_completions(trainer.generations[0])
    trainer.call("on_step_end")
    rows = novarl.load_run(tmp_path / "run").rollouts(1)
    assert len(rows) == 8 and [bool(row.tokens) for row in rows] == [True] * 4 + [False] * 4
    assert rows[5].extra["advantage"] == -1.0 and rows[5].reward == 0.5 and rows[7].group == 3


def test_a_second_run_is_written_beside_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _, _ = trained(tmp_path)
    again, _, _ = trained(tmp_path)
    assert (first.path.name, again.path.name) == ("run", "run-2")
    assert "already holds a run" in capsys.readouterr().err


def test_a_resumed_run_forgets_what_is_trained_again(tmp_path: Path) -> None:
    first, _, _ = trained(tmp_path)
    trainer = Trainer(STEPS[1:])
    trainer.state.global_step, trainer.state.max_steps = 1, 2
    callback = NovaCallback(tmp_path / "run")
    trainer.add_callback(callback)
    trainer.train()
    assert callback.path == first.path and [row["step"] for row in first.metrics] == [1, 2]
    assert first.steps() == [1, 2] and (first.summary or {})["status"] == "done"
    assert [event["step"] for event in first.events if event["kind"] == "save"] == [1, 2]


def test_a_setting_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(NovaError, match="rollouts_every is 0"):
        NovaCallback(tmp_path / "run", rollouts_every=0)


def test_above_the_size_limit_one_step_in_ten_is_recorded(tmp_path: Path) -> None:
    trainer = Trainer(STEPS * 6)
    trainer.add_callback(NovaCallback(tmp_path / "run", rollouts_gb=1e-9))
    trainer.train()
    run = novarl.load_run(tmp_path / "run")
    assert run.steps() == [1, 10] and len(run.metrics.series("episodes")) == 12


def test_one_generation_for_two_steps_has_the_values_of_both(tmp_path: Path) -> None:
    class Reused(Trainer):
        """Trains on the first half of a generation in one step, and on the second half in the next."""

        def train(self) -> None:
            self.call("on_train_begin")
            for half in (slice(0, 2), slice(2, 4)):
                self.call("on_step_begin")
                if half.start == 0:
                    batch = self._generate_and_score_completions(self.generations[0])
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)[half]
                mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)[half]
                self._get_per_token_logps_and_entropies(self.model, ids, mask, batch["completion_ids"].shape[1])
                self.state.global_step += 1
                self.call("on_step_end")
                rows = novarl.load_run(tmp_path / "run").rollouts(1)
                assert [bool(row.logp) for row in rows] == [True] * 2 + [half.start > 0] * 2

    trainer = Reused(STEPS[:1])
    callback = attach(trainer, tmp_path / "run")
    trainer.train()
    assert callback.failure is None and novarl.load_run(tmp_path / "run").steps() == [1]


def test_without_the_trainer_it_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(STEPS)
    callback = NovaCallback(tmp_path / "run")
    callback.on_train_begin(trainer.args, trainer.state, None)
    callback.on_step_end(trainer.args, trainer.state, None)
    assert "answers are not recorded" in capsys.readouterr().err and callback.failure is None
    assert callback.on_prediction_step() is None and not hasattr(callback, "other")


def test_it_loads_neither_torch_nor_transformers() -> None:
    modules = "novarl.integrations.trl, novarl.integrations.openrlhf, novarl.integrations.commands"
    code = f"import sys, {modules}; assert not {{'torch', 'transformers', 'trl', 'pyarrow'}} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
