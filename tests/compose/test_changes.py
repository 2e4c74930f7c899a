"""What a run that goes on says of its settings, and which it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from novarl.compose.settings import run_settings
from novarl.config.load import load, to_yaml
from novarl.config.tree import RLConfig
from novarl.core.errors import NovaError
from novarl.core.rundir import RunDir
from novarl.run.changes import changes

FIRST = (
    "task=sort",
    "optim.lr=1e-3",
    "task_options.length=4",
    "reward.style.source=lexical",
    "reward.style.weight=2.0",
)


def changed(tmp_path: Path, *words: str, first: tuple[str, ...] = FIRST) -> list[str]:
    """What is said of a run that was begun with `first` and goes on with `words`."""
    (tmp_path / "config.yaml").write_text(to_yaml(load(RLConfig, overrides=first)))
    return found_by(load(RLConfig, overrides=words), tmp_path)


def found_by(config: RLConfig, tmp_path: Path) -> list[str]:
    settings = run_settings(config, threads=1)
    return changes(settings.values, RunDir(tmp_path), settings.named_by_user)


def test_the_same_settings_are_no_change(tmp_path: Path) -> None:
    assert changed(tmp_path, *FIRST) == []
    free = ("steps=7", "save_every=1", "eval_every=2", "keep=9", "keep_best=false", "log.console=false")
    assert changed(tmp_path, *FIRST, *free, "run_dir=x", "resume=auto") == []


def test_each_change_is_said_with_what_it_was(tmp_path: Path) -> None:
    found = changed(tmp_path, "task=sort", "optim.lr=1e-4", "task_options.width=3", "adv.norm_std=true", "seed=1")
    assert sorted(found) == [
        "with adv.norm_std=true (previously null)",
        "with optim.lr=0.0001 (previously 0.001)",
        "with seed=1 (previously 0)",
        "with task_options.width=3 (previously not set)",
        "without reward.style.source (previously lexical)",
        "without reward.style.weight (previously 2.0)",
        "without task_options.length (previously 4)",
    ]


def test_what_only_a_later_version_knows_is_no_change(tmp_path: Path) -> None:
    changed(tmp_path, *FIRST)
    file = tmp_path / "config.yaml"
    older = "".join(
        line for line in file.read_text().splitlines(True) if "keep_best" not in line and "min_p" not in line
    )
    assert older != file.read_text()
    file.write_text(older)
    assert found_by(load(RLConfig, overrides=FIRST), tmp_path) == []


def test_rows_of_data_are_no_task(tmp_path: Path) -> None:
    data = ("data=rows.jsonl", "reward=lexical")
    with pytest.raises(NovaError, match="has task=null, but this one has task=sort"):
        changed(tmp_path, "task=sort", first=data)
    assert changed(tmp_path, "data=other.jsonl", "reward=lexical", first=data) == [
        "with data=other.jsonl (previously rows.jsonl)"
    ]


@pytest.mark.parametrize(("key", "value"), [("task", "arithmetic"), ("algo", "grpo")])
def test_another_run_is_refused(key: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(NovaError, match=f"has {key}=.*, but this one has {key}={value}"):
        changed(tmp_path, "task=sort", f"{key}={value}", first=("task=sort",))
