"""Whole runs of two processes: what they write, and that they are the run of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from novarl.compose import run_training
from novarl.config.load import load
from novarl.config.tree import RLConfig, SFTConfig
from novarl.core.errors import NovaError
from novarl.core.processor import exact_products
from novarl.core.rundir import RunDir
from novarl.distributed.ranks import Ranks
from novarl.observe.glossary import deterministic
from novarl.run import report
from tests.distributed.fork import run
from tests.invariance import little_run

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate", "shutil.rmtree")
"""Audit events of what changes a directory; opening a file for writing is the other way."""


def watched(ranks: Ranks, words: list[str], run_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """The run's summary, and everything this process changed in the run directory."""
    changed: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (opened or event in CHANGES) and any(str(run_dir) in str(arg) for arg in args):
            changed.append(f"{event} {args}")

    sys.addaudithook(hook)
    return little_run.run(words, run_dir), changed


def test_rank_0_alone_writes(tmp_path: Path) -> None:
    words = [
        *little_run.write(tmp_path),
        "log.rollouts_every=1",
        "log.tensorboard=true",
        "kl.type=loss",
        "kl.coef=0.01",
    ]
    (first, wrote), (second, wrote_too) = run(watched, words, tmp_path / "two")
    assert first["status"] == second["status"] == "done"
    for part in ("metrics.jsonl", "reference", "tb", "rollouts", "checkpoints", "summary.json", "manifest.json"):
        assert any(part in change for change in wrote), f"rank 0 was not seen to write {part}"
    assert wrote_too == []


@pytest.mark.parametrize("cut", [[], ["rollout.top_p=0.9", "rollout.min_p=0.01"]], ids=["plain", "truncated"])
def test_a_run_of_two_is_the_run_of_one(cut: list[str], tmp_path: Path) -> None:
    words = [*little_run.write(tmp_path), *cut]
    little_run.run(words, tmp_path / "one")
    run(watched, words, tmp_path / "two")
    one, two = (little_run.metrics(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == 4 and one[0]["reward_std"] > 0.0
    for alone, together in zip(one, two, strict=True):
        assert alone.keys() == together.keys()
    for name, value in one[0].items():
        if name not in ("phase", "kl", "kl_mean", "kl_std", "kl_to_ref"):  # those look at each rank's first micro-batch
            assert two[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert json.loads((tmp_path / "two" / "manifest.json").read_text())["ranks"] == 2


def late(ranks: Ranks, words: list[str], run_dir: Path) -> str:
    """Rank 1 looks at the directory long after rank 0 did."""
    look = RunDir.refuse_if_taken

    def dawdle(self: RunDir) -> None:
        time.sleep(1.5 * ranks.rank)
        look(self)

    with mock.patch.object(RunDir, "refuse_if_taken", dawdle):
        return str(little_run.run([*words, "steps=1"], run_dir)["status"])


def test_a_late_rank_does_not_meet_its_own_run(tmp_path: Path) -> None:
    assert run(late, little_run.write(tmp_path), tmp_path / "run") == ["done", "done"]


SORT = [
    "task=sort",
    "warmup=4",
    "steps=2",
    "prompts_per_rollout=4",
    "responses_per_prompt=4",
    "eval.n=8",
    "save_every=1",
    "log.console=false",
    "log.tensorboard=false",
    "log.rollouts_every=1",
    "threads=1",
    "device=cpu",
]


def start(run_dir: Path, *launcher: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_CBWR": exact_products()}
    reward = f"reward={run_dir.parent / 'reward.py'}:reward_fn"  # sorting is beyond so young a model: all would score 0
    command = [*launcher, "-m", "novarl", "rl", *SORT, reward, f"run_dir={run_dir}"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_torchrun(tmp_path: Path) -> None:
    """The command of the README, but for a port that nobody else uses."""
    (tmp_path / "reward.py").write_text(little_run.REWARD)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    runs = {
        "one": start(tmp_path / "one", sys.executable),
        "two": start(tmp_path / "two", torchrun, "--standalone", "--nproc_per_node=2"),
    }
    try:
        for process in runs.values():
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0, said
    finally:
        for process in runs.values():
            process.terminate()  # torchrun passes it on to its ranks
            process.wait()
    manifests = {name: json.loads((tmp_path / name / "manifest.json").read_text()) for name in runs}
    assert {name: manifest["ranks"] for name, manifest in manifests.items()} == {"one": 1, "two": 2}
    one, two = (little_run.metrics(tmp_path / name) for name in runs)
    assert [line["phase"] for line in two] == [line["phase"] for line in one] == ["warmup"] * 4 + ["rl"] * 2
    for alone, together in zip(one[:4], two[:4], strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    for name in ("reward_mean", "reward_std", "reward_raw_mean", "episodes", "completion_tokens", "groups_kept"):
        assert two[4][name] == one[4][name], name
    assert one[4]["reward_std"] > 0.0
    texts = [
        [line["text"] for line in little_run.lines(tmp_path / name / "rollouts" / "step-000001.jsonl")] for name in runs
    ]
    assert texts[0] == texts[1] and len(set(texts[0])) > 8
    events = [line["kind"] for line in little_run.lines(tmp_path / "two" / "events.jsonl")]
    assert events.count("start") == events.count("summary") == 1
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in runs]
    assert summaries[0]["before"] == summaries[1]["before"] and summaries[1]["steps"] == 2


def command(ranks: Ranks, kind: str, words: list[str], run_dir: Path) -> str:
    """The status of a run; what it draws is left out."""
    del ranks
    settings: type[RLConfig | SFTConfig] = RLConfig if kind == "rl" else SFTConfig
    with mock.patch.object(report, "draw"):
        return str(run_training(load(settings, None, [*words, f"run_dir={run_dir}"]))["status"])


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_sharded_run_goes_on_bit_by_bit(kind: str, tmp_path: Path) -> None:
    """And is the run of one process, which holds the whole model."""
    words = [*little_run.write(tmp_path), "kl.type=loss", "kl.coef=0.01", "eval_every=1"]
    if kind == "sft":
        words = [f"model={tmp_path / 'model'}", "task=sort", "steps=2", "batch_size=7", "eval.n=4", "save_every=1"]
        words += ["device=cpu", "threads=1", "log.console=false", "log.tensorboard=false"]
    sharded = [*words, "fsdp=true"]
    command(Ranks(), kind, words, tmp_path / "one")
    assert run(command, kind, sharded, tmp_path / "whole") == ["done", "done"]
    assert run(command, kind, [*sharded, "steps=1"], tmp_path / "parts") == ["done", "done"]
    assert run(command, kind, [*sharded, "resume=auto"], tmp_path / "parts") == ["done", "done"]
    one, whole, parts = (
        [
            {name: value for name, value in line.items() if deterministic(name)}
            for line in little_run.metrics(tmp_path / name)
        ]
        for name in ("one", "whole", "parts")
    )
    assert len(whole) == len(one) > 1 and whole[0]["grad_norm"] != whole[-1]["grad_norm"]
    assert parts == whole
    for name, value in one[0].items():
        if name not in ("phase", "kl", "kl_mean", "kl_std", "kl_to_ref"):  # those look at each rank's first micro-batch
            assert whole[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    at = Path("checkpoints", "latest", "model", "model.safetensors")
    weights = {name: (tmp_path / name / at).read_bytes() for name in ("one", "whole", "parts")}
    assert weights["whole"] == weights["parts"] != (tmp_path / "model" / "model.safetensors").read_bytes()
    assert len(weights["whole"]) == len(weights["one"])


def test_sharding_is_refused_where_it_is_not_possible(tmp_path: Path) -> None:
    words = [*little_run.write(tmp_path), "fsdp=true"]
    with pytest.raises(NovaError, match="only one") as refused:
        little_run.run(words, tmp_path / "one")
    assert "torchrun" in str(refused.value) and not (tmp_path / "one").exists()
