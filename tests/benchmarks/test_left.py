"""Resume gives every file of the run that was never stopped; and the comparison sees when it does not."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks.left import differences, left
from novarl.core.checkpoint import Disk
from novarl.observe.sinks.jsonl import JsonlSink
from tests.compose.harness import RL, SFT, finished, novarl, questions, write_rows

REWARD = """
def zeta(completions, **columns):
    return [float(len(text) % 3) for text in completions]

def alpha(completions, **columns):
    return [float(sum(map(ord, text)) % 5) for text in completions]
"""
PARTS = "reward={zeta: {source: 'mine.py:zeta', weight: 1.0}, alpha: {source: 'mine.py:alpha', weight: 0.5}}"
SAVES = ("steps=4", "save_every=1", "log.rollouts_every=1", "log.tensorboard=true")
FAMILIES = {
    "sft": ("sft", *SFT, "data=rows.jsonl", "steps=4", "save_every=1", "eval_every=2"),
    "rl": ("rl", *RL, "data=rows.jsonl", PARTS, *SAVES, "eval_every=1"),
    "rl, sampled ahead": ("rl", *RL, "data=rows.jsonl", PARTS, *SAVES, "rollout.staleness=1"),
    "a critic": ("rl", *RL, "data=rows.jsonl", PARTS, *SAVES, "algo=ppo"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"zz": 1, "aa": {"y": 1, "b": 2}, **row} for row in questions()]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "mine.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", FAMILIES.values(), ids=FAMILIES)
def test_a_run_that_was_stopped_and_resumed_leaves_every_file_of_one_that_was_not(
    words: tuple[str, ...], folder: Path
) -> None:
    report = JsonlSink.step

    def step(sink: JsonlSink, at: int, record: Mapping[str, float]) -> None:
        report(sink, at, record)
        if at == 2:
            signal.raise_signal(signal.SIGTERM)

    finished(*words, "run_dir=whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonlSink, "step", step)
        assert novarl(*words, "run_dir=run").code == 130
    finished(*words, "run_dir=run", "resume=auto")
    whole, run = left(folder / "whole"), left(folder / "run")
    assert {"manifest.json", "summary.json", "config.yaml", "metrics.jsonl", "checkpoints/latest"} <= whole.keys()
    assert differences(run, whole) == []


def test_a_kill_in_the_last_save_changes_no_file(folder: Path) -> None:
    class Killed(BaseException):
        pass

    real = Disk.rename

    def rename(disk: Disk, source: Path, target: Path) -> None:
        if target.name == "latest" and (target.parent / "step-000004").exists():
            raise Killed
        real(disk, source, target)

    finished(*FAMILIES["rl"], "run_dir=whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Disk, "rename", rename)
        novarl(*FAMILIES["rl"], "run_dir=run")
    finished(*FAMILIES["rl"], "run_dir=run", "resume=auto")
    assert differences(left(folder / "run"), left(folder / "whole")) == []


def test_the_columns_of_a_rollout_log_carry_their_names(folder: Path) -> None:
    finished(*FAMILIES["rl"], "run_dir=run")
    with safe_open(folder / "run" / "rollouts" / "step-000001.safetensors", "pt") as file:
        names = json.loads(file.metadata()["about"])["reward_names"]
        rewards = file.get_tensor("rewards")
    lines = (folder / "run" / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    assert sorted(names) == ["alpha", "zeta"]
    assert rewards.tolist() == [[json.loads(line)["rewards"][name] for name in names] for line in lines]


def test_every_kind_of_difference_is_seen(folder: Path) -> None:
    finished(*FAMILIES["rl"], "run_dir=whole")
    whole = left(folder / "whole")

    def changed(name: str, old: str, new: str) -> list[str]:
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(folder / "whole", folder / "run", symlinks=True)
        path = folder / "run" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        return differences(left(folder / "run"), whole)

    assert changed("metrics.jsonl", '"step": 2', '"step": 9') == ["metrics.jsonl"]
    assert changed("summary.json", '"done"', '"unsaved"') == ["summary.json"]
    assert changed("config.yaml", "seed: 0", "seed: 1") == ["config.yaml"]
    assert changed("rollouts/step-000002.jsonl", "zeta", "beta") == ["rollouts/step-000002.jsonl"]
    latest = folder / "run" / "checkpoints" / "latest"
    latest.unlink()
    latest.symlink_to("step-000003")
    (folder / "run" / "checkpoints" / ".step.saving").write_text("")
    assert "checkpoints/latest" in differences(left(folder / "run"), whole)
    assert "checkpoints/.step.saving" in differences(left(folder / "run"), whole)
