"""`~` at the beginning of a path is the home directory, in every key, in files and on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from novarl.config.load import load, peek_kind, to_dict
from novarl.config.preference import DPOConfig
from novarl.config.tree import EvalConfig, RLConfig, SampleConfig, SFTConfig


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "given", "key"),
    [
        (RLConfig, "data=~/rows.jsonl", "data"),
        (RLConfig, "model=~/models/one", "model"),
        (RLConfig, "run_dir=~/runs/one", "run_dir"),
        (RLConfig, "resume=~/runs/one/checkpoints/latest", "resume"),
        (RLConfig, "kl.reference=~/models/one", "kl.reference"),
        (RLConfig, "eval.data=~/held.jsonl", "eval.data"),
        (RLConfig, "prime.model=~/runs/rm", "prime.model"),
        (RLConfig, "rollout.env_path=~/env.py", "rollout.env_path"),
        (RLConfig, "adv.estimator=~/mine.py:credit", "adv.estimator"),
        (RLConfig, "loss.surrogate=~/mine.py:loss", "loss.surrogate"),
        (RLConfig, "actor.model_name=~/models/one", "model"),
        (SFTConfig, "data=~/rows.jsonl", "data"),
        (DPOConfig, "data=~/pairs.jsonl", "data"),
        (EvalConfig, "model=~/models/one", "model"),
        (SampleConfig, "model=~/models/one", "model"),
    ],
)
def test_every_path_is_expanded(home: Path, kind: type, given: str, key: str) -> None:
    base = {"model": "tiny"} if kind in (EvalConfig, SampleConfig) else {}
    if kind is not SampleConfig and not given.startswith("data="):
        base["data"] = "rows.jsonl"
    if kind in (RLConfig, EvalConfig):
        base["reward"] = "length"
    value = to_dict(load(kind, overrides=[*(f"{name}={text}" for name, text in base.items()), given]))
    for part in key.split("."):
        value = value[part]
    assert value == str(home / given.partition("=~/")[2])


def test_rewards_and_files_are_expanded_too(home: Path) -> None:
    (home / "mine.yaml").write_text("kind: rl\ntask: sort\nreward: {a: ~/r.py:f, b: {source: 'model:~/runs/rm'}}\n")
    assert peek_kind("~/mine.yaml") == "rl"
    reward = load(RLConfig, "~/mine.yaml").reward
    assert reward is not None
    assert {name: spec.source for name, spec in reward.items()} == {"a": f"{home}/r.py:f", "b": f"model:{home}/runs/rm"}
    listed = load(RLConfig, overrides=["task=sort", "reward_funcs=[~/a.py:x, ~/b.py:y]"]).reward
    assert listed is not None and [spec.source for spec in listed.values()] == [f"{home}/a.py:x", f"{home}/b.py:y"]
    single = load(RLConfig, overrides=["task=sort", "reward=model:~/runs/rm"]).reward
    assert single is not None and single["model"].source == f"model:{home}/runs/rm"


def test_what_is_said_to_a_model_is_left_as_it_is() -> None:
    config = load(SampleConfig, overrides=["model=tiny", "prompt=~/x means home", "sampling.stop=['~/']"])
    assert (config.prompt, config.sampling.stop) == ("~/x means home", ("~/",))
