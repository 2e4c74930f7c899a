"""`python -m novarl.trainer.NAME` and `python -m recipes.NAME`, as RL2 and NanoRL start runs; also under torchrun.

`runpy` does in this process what `python -m` does in a new one; one command of each kind is really started.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compose.harness import QUIET, ROOT, lightly, metrics, questions, summary, write_rows

QUICK = ("steps=1", "eval.n=2", *QUIET)
RL = ("task=sort", "warmup=1", "prompts_per_rollout=2", "responses_per_prompt=2", "rollout.max_tokens=4", *QUICK)
RUNS = {
    "ppo": RL,
    "sft": ("data=rows.jsonl", "batch_size=2", *QUICK),
    "dpo": ("data=pairs.jsonl", "batch_size=2", *QUICK),
    "rm": ("data=pairs.jsonl", "batch_size=2", *QUICK),
}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m")
RECIPE = ("--batch-size", "30", "--num-epochs", "1", "--warmup-steps", "1", "--max-new-tokens", "2", "--eval-samples=1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_rows(Path("rows.jsonl"), questions())
    rows = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "No idea."} for i in range(20)]
    write_rows(Path("pairs.jsonl"), rows)


def as_module(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", [name, *words])
    with lightly():
        try:
            runpy.run_module(name, run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def started(*words: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", RUNS)
def test_trainers_run_as_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_module(monkeypatch, f"novarl.trainer.{name}", *RUNS[name], "run_dir=run") == 0
    found = summary(Path("run"))
    assert (found["status"], found["command"]) == ("done", "rl" if name == "ppo" else name)
    assert name != "ppo" or (found["algo"] == "ppo" and "value_loss" in metrics(Path("run"))[-1])


@pytest.mark.parametrize("name", RUNS)
def test_the_usage_names_the_module(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_module(monkeypatch, f"novarl.trainer.{name}", "--help") == 0
    usage = f"usage: python -m novarl.trainer.{name} [CONFIG] [key=value ...]\n"
    assert capsys.readouterr().out.startswith(usage)


def test_a_mistake_is_one_line_and_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_module(monkeypatch, "novarl.trainer.sft", "task=sort", "stepz=1") == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and "did you mean steps" in said


def test_a_trainer_under_torchrun_writes_the_run_of_one_process() -> None:
    started(sys.executable, "-m", "novarl.trainer.ppo", *RUNS["ppo"], "run_dir=one")
    started(*TORCHRUN, "novarl.trainer.ppo", *RUNS["ppo"], "run_dir=two")
    assert summary(Path("two"))["status"] == "done"
    one, two = metrics(Path("one"))[-1], metrics(Path("two"))[-1]
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", ["reinforce", "rloo"])
def test_recipes_run_as_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    assert as_module(monkeypatch, f"recipes.{name}", *RECIPE, "--output-dir", "out") == 0
    assert Path("out/model.safetensors").is_file()


def test_a_recipe_runs_under_torchrun() -> None:
    """Each process trains the same model, and writes the same files."""
    started(*TORCHRUN, "recipes.rloo", *RECIPE, "--output-dir", "out")
    started(sys.executable, "-m", "recipes.rloo", *RECIPE, "--output-dir", "alone")
    assert Path("out/model.safetensors").read_bytes() == Path("alone/model.safetensors").read_bytes()
