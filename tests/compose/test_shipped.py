"""Every shipped configuration and every algorithm runs one step, and writes only what the glossary knows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from novarl.algos.named import ALGORITHMS
from novarl.observe.glossary import lookup
from tests.compose.harness import QUIET, RL, ROOT, SFT, finished, metrics, questions, summary, write_rows

CONFIGS = sorted(file for file in (ROOT / "configs").iterdir() if file.is_file())
SMALL = ("steps=1", "prompts_per_rollout=2", "responses_per_prompt=4", "eval.n=4", "rollout.max_tokens=8", *QUIET)
PROMISED = (
    *("total_loss", "policy_loss", "kl_loss", "reward_mean", "reward_std", "kl_mean", "kl_std", "clip_fraction"),
    *("policy_objective", "kl", "kl_to_ref", "kl_penalty", "kl_coef", "episodes_per_second"),
)
"""The names that the kit's and NovaRL's tools look for."""
ODD = {
    "a greedy baseline": "algo=reinforce adv.estimator=scst",
    "a moving average": "algo=reinforce adv.estimator=ema adv.ema_beta=0.5",
    "whitened": "adv.whiten=true",
    "KL as reward": "algo=rloo kl.type=reward kl.coef=0.1",
    "KL as advantage": "algo=rloo kl.type=advantage kl.coef=0.1",
    "corrected": "correction.tis_max=2",
    "an entropy bonus": "entropy.coef=0.01",
    "refilled": "dynamic_sampling.enabled=true",
    "evaluated on the way": "eval_every=1 eval.k=2",
    "in bfloat16": "dtype=bfloat16",
    "with everything on": "micro.gradient_checkpointing=true micro.max_tokens=32 log.tensorboard=true",
}


def assert_explained(run: Path) -> set[str]:
    """Every name that the run wrote is explained, and every value is a number."""
    records = metrics(run)
    assert records
    for record in records:
        for name, value in record.items():
            if name not in ("schema", "phase", "step"):
                assert lookup(name) and math.isfinite(value), f"{name}={value} in phase {record['phase']}"
    return {name for record in records for name in record}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_shipped_configuration_runs_one_step(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # their paths are meant from there
    kind = next(
        kind
        for kind in ("rl", "sft", "dpo", "rm", "eval")
        if f"kind: {kind}" in (text := file.read_text()) or f'"{kind}"' in text
    )
    rows = ({"question": f"What is {i} + 1?", "answer": f"It is\n#### {i + 1}"} for i in range(40))
    of_file = {
        "gsm8k": rows,
        "hh": [
            {"chosen": f"\n\nHuman: {i}\n\nAssistant: a", "rejected": f"\n\nHuman: {i}\n\nAssistant: b"}
            for i in range(40)
        ],
        "reviews": [{"text": f"film {i}", "label": ("positive", "negative")[i % 2]} for i in range(40)],
    }.get(file.stem.rpartition("_")[2])
    data = (f"data={write_rows(tmp_path / 'rows.jsonl', of_file)}",) if of_file else ()
    words = {
        "rl": (*SMALL, "eval_every=1") if data else (*SMALL, "warmup=2", "eval_every=1"),
        "sft": SFT,
        "dpo": (*SFT, "eval_every=1"),
        "rm": (*SFT, "eval_every=1"),
        "eval": ("eval.n=4", "rollout.max_tokens=8"),
    }
    run = tmp_path / "run"
    finished(kind, str(file), *words[kind], *data, f"run_dir={run}")
    assert summary(run)["status"] == "done" and summary(run)["steps"] == (kind != "eval")
    if kind != "eval":
        assert_explained(run)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_runs_one_step(algo: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished("rl", "task=sort", "warmup=2", *SMALL, f"algo={algo}", f"run_dir={run}")
    updates = ALGORITHMS[algo].updates_per_rollout
    assert summary(run)["algo"] == algo and (summary(run)["steps"], summary(run)["updates"]) == (1, updates)
    names = assert_explained(run)
    if ALGORITHMS[algo].kl_coef:
        assert names >= set(PROMISED)


@pytest.mark.parametrize("words", ODD.values(), ids=ODD)
def test_every_part_runs_and_says_only_what_is_explained(words: str, tmp_path: Path) -> None:
    data, run = write_rows(tmp_path / "rows.jsonl", questions()), tmp_path / "run"
    finished("rl", *RL, f"data={data}", "reward=lexical", *words.split(), f"run_dir={run}")
    assert_explained(run)


def test_a_metric_without_an_explanation_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from novarl.run.session import Session

    report = Session._report
    monkeypatch.setattr(
        Session, "_report", lambda self, step, record, whole: report(self, step, record | {"novel": 1.0}, whole=whole)
    )
    data, run = write_rows(tmp_path / "rows.jsonl", questions()), tmp_path / "run"
    finished("rl", *RL, f"data={data}", "reward=lexical", f"run_dir={run}")
    with pytest.raises(KeyError, match="novel"):
        assert_explained(run)
