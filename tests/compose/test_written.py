"""Nothing in the glossary is a promise alone: every metric that it explains is written by some run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from novarl.observe import glossary
from novarl.observe.glossary import METRICS, lookup
from tests.compose.harness import ON_TASK, RL, SFT, finished, metrics, questions, write_rows

CONSTRAINED = "constraint_optimization.enabled=true constraint_optimization.kl_constraint=0.001"
RUNS = {
    "supervised": ("sft", *SFT, "task=sort"),
    "a reference, corrected, judged on the way": (
        *("rl", *ON_TASK, "algo=grpo", "entropy.coef=0.01", "correction.tis_max=2"),
        *("eval_every=1", "eval.k=2"),
    ),
    "a critic": ("rl", *ON_TASK, "algo=ppo"),
    "values by continuations": ("rl", *ON_TASK, "algo=vineppo"),
    "process rewards": ("rl", *ON_TASK, "algo=prime"),
    "constraints": (
        *("rl", *ON_TASK, "algo=grpo", *CONSTRAINED.split(), "constraint_optimization.entropy_constraint=0.1"),
    ),
    "a step guard": (*("rl", *ON_TASK, "algo=grpo", *CONSTRAINED.split(), "constraint_optimization.mode=rollback"),),
    "an early stop": (
        *("rl", *ON_TASK, "algo=grpo", *CONSTRAINED.split(), "constraint_optimization.mode=early_stop"),
        "updates_per_rollout=2",
    ),
    "a guard that skips": (
        "rl",
        *ON_TASK,
        "algo=grpo",
        "optim.lr=0.5",
        "steps=4",
        "guard.on_alert={kl_explosion: skip}",
    ),
    "groups that teach nothing": ("rl", *ON_TASK, "algo=grpo", "loss.surrogate=gpg"),
    "several objectives": (
        *("rl", *ON_TASK, "multi_objective.enabled=true", "eval_every=1"),
        "multi_objective.objectives={reward: {direction: max}, length: {direction: min}}",
    ),
    "several turns": (
        *("rl", *RL, "data={rows}", "reward=lexical", "rollout.env_path={env}", "rollout.max_turns=2"),
        *("rollout.max_tokens=64", "rollout.stop=[e,t,a,o,i,n,s,r]"),
    ),
}
"""The smallest runs that between them write every metric; of {rows} and {env}, whose files are written for them."""
ENV = 'def interact(messages):\n    return [{"role": "user", "content": "go on"}]\n'
ELSEWHERE = frozenset(glossary.PREFERENCE) | {"split_micro_batches", "memory_device_mb", "logged/<name>"}
"""Written by the runs on pairs, where memory runs out, on a GPU, and by a user's log_metric, in tests of their own."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> set[int]:
    """The entries, by identity, of the metrics that the runs wrote."""
    found: set[int] = set()
    home = tmp_path_factory.mktemp("written")
    (env := home / "env.py").write_text(ENV)
    files = {"{rows}": str(write_rows(home / "rows.jsonl", questions())), "{env}": str(env)}
    for number, words in enumerate(RUNS.values()):
        run = home / str(number)
        finished(*(re.sub(r"\{(rows|env)\}", lambda name: files[name[0]], word) for word in words), f"run_dir={run}")
        names = {name for record in metrics(run) for name in record} - {"schema", "phase"}
        found |= {id(lookup(name)) for name in names}
    return found


def test_the_memory_of_a_gpu_where_one_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 3 * 2**20)
    for used in (True, False):
        monkeypatch.setattr("torch.cuda.is_initialized", lambda used=used: used)
        finished("sft", *SFT, "task=sort", f"run_dir={tmp_path / str(used)}")
        assert metrics(tmp_path / str(used))[-1].get("memory_device_mb") == (3.0 if used else None)


@pytest.mark.parametrize("name", sorted(set(METRICS) - ELSEWHERE))
def test_every_metric_is_written_by_some_run(written: set[int], name: str) -> None:
    assert id(METRICS[name]) in written, f"no run writes {name}: write it, or take it out of the glossary"
