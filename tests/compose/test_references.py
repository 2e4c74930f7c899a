"""What may stand as `kl.reference`: a model of the policy's tokens that takes every sequence the policy may write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from novarl.models.load import load, save
from novarl.models.transformer import Decoder
from tests.compose.harness import ON_TASK, finished, metrics, novarl

WORDS = ("rl", "model=tiny", *ON_TASK, "algo=grpo", "kl.coef=0.1", "run_dir=run")


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another model of the same tokens, in the working directory."""
    monkeypatch.chdir(tmp_path)
    save(load("tiny", seed=5), tmp_path / "other")
    return tmp_path / "other"


def said(*words: str) -> str:
    ended = novarl(*words)
    assert ended.code == 2
    return ended.err


def test_a_model_of_a_shorter_context_is_refused_by_what_the_rows_may_become(reference: Path) -> None:
    """Beyond its context a reference's numbers would be of nothing that it learnt, and nothing would tell."""
    file = reference / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 16}))
    error = said(*WORDS, "kl.reference=other", "rollout.max_tokens=12")
    assert "kl.reference=other: this model's context is 16 tokens, but a prompt with its answer may have " in error, (
        error
    )
    prompt = int(error.partition("may have ")[2].split()[0]) - 12
    assert "may have 17 tokens" in said(*WORDS, "kl.reference=other", f"rollout.max_tokens={17 - prompt}")
    assert not Path("run").exists()
    finished(*WORDS, "kl.reference=other", f"rollout.max_tokens={16 - prompt}")
    assert metrics(Path("run"))[-1]["kl_mean"] > 1e-3


def test_of_several_turns_the_policys_whole_context_counts(reference: Path) -> None:
    file = reference / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 4095}))
    Path("tools.py").write_text("def interact(messages):\n    return []\n")
    several = ("rollout.max_turns=2", "rollout.env_path=tools.py", "reward=length")
    error = said(*WORDS, *several, "kl.reference=other")
    assert "context is 4095 tokens, but a prompt with its answer may have 4096 tokens" in error, error


def test_a_model_of_other_tokens_is_refused(reference: Path) -> None:
    policy = load("tiny")
    wider = Decoder(replace(policy.model.config, vocab_size=328))
    save(replace(policy, model=wider), reference)
    assert "this model and the policy have different tokenizers" in said(*WORDS, "kl.reference=other")
