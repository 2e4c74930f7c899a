"""No key of the configuration is idle: every leaf is read by some run, after the configuration was checked and before
it is written down."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from novarl import cli
from novarl.config import tree
from novarl.config.base import Config
from novarl.config.keys import keys
from novarl.config.parts import Node
from novarl.config.preference import DPOConfig, RMConfig
from novarl.config.tree import EvalConfig, RLConfig, SampleConfig, SFTConfig
from tests.compose.harness import ON_TASK, RL, SFT, finished, questions, write_rows

MODES = ("lagrangian", "penalty", "early_stop", "rollback")
BOUND = ("constraint_optimization=true", "constraint_optimization.kl_constraint=0.1")
BEST = ("task=sort", "model=tiny", "reward={a: length, b: lexical}", "best_of=a", "eval.k=2", "rollout.max_tokens=4")
RUNS = (
    ("rl", *ON_TASK, "run_dir=on_task"),
    ("rl", *ON_TASK, "run_dir=on_task", "resume=auto", "steps=2"),
    ("rl", *RL, "data=rows.jsonl", "reward=mine.py:reward_fn", "run_dir=on_rows", "eval.data=held_out.jsonl"),
    ("rl", *ON_TASK, "algo=ppo", "run_dir=ppo"),
    ("rl", *ON_TASK, "algo=ppo", "critic.shared=true", "run_dir=ppo_shared"),
    ("rl", *ON_TASK, "algo=vineppo", "vine.samples=2", "run_dir=vineppo"),
    ("rl", *ON_TASK, "algo=prime", "run_dir=prime"),
    *(
        ("rl", *ON_TASK, "algo=grpo", "adaptive_kl=true", f"adaptive_kl.controller_type={kind}", f"run_dir={kind}")
        for kind in ("fixed", "dead_band", "ziegler", "exponential", "two_speed", "linear", "pid", "schedule")
    ),
    *(("rl", *ON_TASK, *BOUND, f"constraint_optimization.mode={mode}", f"run_dir={mode}") for mode in MODES),
    ("rl", *ON_TASK, "multi_objective=true", "multi_objective.objectives=[reward,kl,entropy]", "run_dir=several"),
    ("rl", *ON_TASK, "entropy.target=1", "run_dir=entropy"),
    ("rl", *ON_TASK, "algo=grpo", "kl.reference=ema", "correction.type=icepop", "run_dir=corrected"),
    ("rl", *ON_TASK, "rollout.staleness=1", "rollout.threads=1", "correction.type=sequence", "run_dir=overlapped"),
    ("sft", *SFT, "task=sort", "lora.rank=2", "run_dir=taught"),
    ("sft", *SFT, "data=rows.jsonl", "run_dir=taught_rows", "steps=null", "epochs=0.1"),
    ("dpo", *SFT, "data=pairs.jsonl", "eval.data=pairs.jsonl", "run_dir=preferring", "epochs=0.1", "steps=null"),
    ("rm", *SFT, "data=pairs.jsonl", "eval.data=pairs.jsonl", "run_dir=rewarding", "epochs=0.1", "steps=null"),
    ("dpo", *SFT, "task=sort", "lora.rank=2", "run_dir=preferring_on_task"),
    ("rm", *SFT, "task=sort", "lora.rank=2", "run_dir=rewarding_on_task"),
    ("eval", "task=sort", "model=tiny", "eval.n=2", "run_dir=judged"),
    ("eval", "data=rows.jsonl", "reward=length", "model=tiny", "rollout.max_tokens=4", "run_dir=judged_rows"),
    ("eval", *BEST, "eval.n=2", "run_dir=judged_best"),
    ("sample", "model=tiny", "prompt=hello", "sampling.max_tokens=4"),
)


@contextmanager
def recorded() -> Iterator[dict[str, set[str]]]:
    """The dotted paths that runs read, by their kind. Checking a configuration happens before it is watched, and to
    dump it reads no attributes: neither counts."""
    read: dict[str, set[str]] = {kind: set() for kind in tree.TREES}
    watched: dict[int, tuple[str, str]] = {}
    alive: list[Config] = []
    load = cli._load

    def watch(node: Node, kind: str, prefix: str) -> None:
        watched[id(node)] = (kind, prefix)
        for name, value in vars(node).items():
            if isinstance(value, Node):
                watch(value, kind, f"{prefix}{name}.")

    def load_and_watch(*args: Any) -> Config:
        watched.clear()
        config = load(*args)
        alive.append(config)  # so that its ids stay its own
        watch(config, config.kind, "")
        return config

    def get(node: Node, name: str) -> Any:
        place = watched.get(id(node))
        if place is not None and not name.startswith("_"):
            read[place[0]].add(place[1] + name)
        return object.__getattribute__(node, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_load", load_and_watch)
        patch.setattr(Node, "__getattribute__", get, raising=False)
        yield read


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What a few small runs of every kind read."""
    folder, before = tmp_path_factory.mktemp("audit"), Path.cwd()
    write_rows(folder / "rows.jsonl", questions())
    write_rows(folder / "held_out.jsonl", questions(2))
    write_rows(folder / "pairs.jsonl", ({"prompt": "q", "chosen": f"{i}", "rejected": f"-{i}"} for i in range(20)))
    (folder / "mine.py").write_text("def reward_fn(messages, answer): return 1.0")
    os.chdir(folder)
    try:
        with recorded() as found:
            for words in RUNS:
                finished(*words)
    finally:
        os.chdir(before)
    return found


@pytest.mark.parametrize("kind", tree.TREES.values(), ids=tree.TREES)
def test_every_leaf_is_read_by_some_run(kind: type[Config], read: dict[str, set[str]]) -> None:
    idle = set(keys(kind)) - read[kind.kind]
    assert not idle, f"no run of novarl {kind.kind} reads {', '.join(sorted(idle))}"


def test_the_audit_goes_through_all_trees() -> None:
    assert set(tree.TREES.values()) == {RLConfig, SFTConfig, DPOConfig, RMConfig, EvalConfig, SampleConfig}
    assert {len(keys(kind)) > 10 for kind in tree.TREES.values()} == {True}


def test_a_planted_leaf_that_nobody_reads_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a check of its range nor the config.yaml that it is written to count as use."""

    class Deeper(tree.SFTConfig):
        idle: int = 3

    Deeper.__module__ = __name__
    monkeypatch.setitem(tree.TREES, "sft", Deeper)
    data, run = write_rows(tmp_path / "rows.jsonl", questions()), tmp_path / "run"
    with recorded() as found:
        finished("sft", *SFT, f"data={data}", f"run_dir={run}", "idle=4")
    assert "idle: 4\n" in (run / "config.yaml").read_text()
    assert "idle" in keys(Deeper) and "idle" not in found["sft"]
    assert {"batch_size", "optim.betas", "log.console"} <= found["sft"]
