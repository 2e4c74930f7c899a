"""What docs/from_the_documents.md says of ours is run, in a tiny form; nothing in it is left out."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from novarl.compose.resolve import resolve_rl
from novarl.config.load import load
from novarl.config.tree import RLConfig
from novarl.core.errors import NovaError
from tests.compose.harness import ROOT, finished, lightly, metrics

TEXT = (ROOT / "docs/from_the_documents.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+) ours ?([\w ]*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
COMMANDS = list(dict.fromkeys(line for kind, _, body in BLOCKS if kind == "bash" for line in body.splitlines()))
NOVARL = [line for line in COMMANDS if line.startswith("novarl ")]
SCRIPTS = [line for line in COMMANDS if line.startswith("python ")]
REST = [line for line in COMMANDS if line not in NOVARL and line not in SCRIPTS]
PYTHON = [body for kind, words, body in BLOCKS if kind == "python" and not words]
LEFT: dict[str, Callable[[Any], bool]] = {
    "coefficient": lambda found: 0.2 < found < 0.3,
    "weights": lambda found: len(found) == 3 and found[0] > 0 > found[1] and found[2] > 0,
    "logprobs": lambda found: bool((found < 0).all()) and found.shape[1] > 5,
    "rewards": lambda found: len(found) == 2 and found[0] > 0,
    "summary": lambda found: (found["status"], found["updates"]) == ("done", 4),
}
"""What each snippet leaves behind, in their order: its name, and what the page says of it."""
QUIET = ("log.console=false", "log.tensorboard=false")
TINY = {
    "rl": ("warmup=1", "steps=1", "prompts_per_rollout=2", "responses_per_prompt=2", "eval.n=2", "eval.k=0", *QUIET),
    "sft": ("steps=1", "batch_size=2", "eval.n=2", *QUIET),
}
"""Enough to go through every part once."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with the shipped configurations, and the documents' data and environment."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    for kind, words, body in BLOCKS:
        for name in words.split():
            if kind == "json":
                Path(f"{name}.json").write_text(json.dumps(json.loads(body) * 8), encoding="utf-8")
            else:
                Path(f"{name}.py").write_text(body, encoding="utf-8")
    return tmp_path


def test_every_marked_block_is_one_that_is_run() -> None:
    assert len(BLOCKS) == len(re.findall(r"^```\w+ ours", TEXT, re.MULTILINE)) and len(COMMANDS) > 40
    assert {kind for kind, _, _ in BLOCKS} == {"bash", "python", "json", "yaml"}
    assert all(line.split()[0] in ("make", "pip", "pytest", "torchrun") for line in REST)
    for document in ("NanoRL", "NovaRL", "OpenRL", "RL2", "RLHF Systems Kit"):
        assert f"\n## {document}\n" in TEXT


@pytest.mark.parametrize("line", NOVARL)
def test_commands_of_ours(line: str) -> None:
    _, command, *words = shlex.split(line)
    if command == "explain":
        assert finished(command, *words).out
    elif command == "sample":
        assert finished(command, *words, "sampling.max_tokens=2").out
    else:
        again = [word for word in words if word == "resume=auto"]
        words = ["num_mc_rollouts=1" if word.startswith("num_mc_rollouts=") else word for word in words]
        extra = [word for word in TINY[command] if "data=" not in line or not word.startswith("warmup=")]
        if command == "rl" and "max_new_tokens" not in line:
            extra.append("rollout.max_tokens=4")
        if "group_size" in line:
            extra.remove("responses_per_prompt=2")
        if again:
            finished(command, *(word for word in words if word not in again), *extra)
        elif not any(word.startswith("run_dir=") for word in words):
            extra.append("run_dir=run")
        finished(command, *words, *extra)


@pytest.mark.parametrize("line", SCRIPTS)
def test_scripts_take_their_flags_and_run(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, script, *flags = shlex.split(line)
    path = ROOT / script
    if script.startswith("recipes/"):  # tests/recipes runs each of them
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        parsed = vars(module.parse_args(flags))
        assert all(name.partition("=")[0][2:].replace("-", "_") in parsed for name in flags if name.startswith("--"))
        return
    short = ["--iterations", "2"] if "train.py" not in script else ["--epochs", "1", "--steps_per_epoch", "1"]
    more = ["--warmup=1", "--eval.n=2", "--responses_per_prompt=4", "--run_dir=run", *(f"--{word}" for word in QUIET)]
    monkeypatch.setattr(sys, "argv", [script, *flags, *short, *(more if "train.py" in script else [])])
    with lightly():
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            assert not end.code
    if "train.py" in script:  # how much it learns: test_kit.py
        assert len([record for record in metrics(Path("run")) if record["phase"] == "rl"]) == 4


@pytest.mark.parametrize("line", REST)
def test_what_is_not_run_here_names_what_there_is(line: str) -> None:
    program, *words = shlex.split(line)
    if program == "make":
        done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif program == "pip":
        assert (ROOT / words[-1]).exists() or "llm = [" in (ROOT / "pyproject.toml").read_text()
        assert words[-1] in (".", ".[llm]", "requirements.txt")
    elif program == "torchrun":
        command = words[words.index("novarl") + 1 :]
        assert command[0] == "rl"
        resolve_rl(load(RLConfig, overrides=command[1:]))
        assert importlib.util.find_spec("torch.distributed.run") is not None


def test_every_snippet_has_something_to_leave() -> None:
    assert len(PYTHON) == len(LEFT) >= 5
    assert all(
        re.search(rf"^(\w+, )*{name}(, \w+)* = ", body, re.MULTILINE) for body, name in zip(PYTHON, LEFT, strict=True)
    )


@pytest.mark.parametrize(("body", "name"), list(zip(PYTHON, LEFT, strict=False)), ids=LEFT)
def test_snippets(body: str, name: str) -> None:
    left: dict[str, Any] = {"__name__": "snippet"}
    with lightly():
        exec(compile(body, "docs/from_the_documents.md", "exec"), left)
    assert LEFT[name](left[name])


@pytest.mark.parametrize("command", ["sft", "dpo", "rm", "rl"])
def test_data_formats_train_as_they_are(command: str) -> None:
    words = (
        ["reward=env.py:reward_fn", *TINY["rl"][1:], "rollout.max_tokens=4"] if command == "rl" else list(TINY["sft"])
    )
    finished(command, f"data={command}.json", *words, "run_dir=run")
    assert json.loads(Path("run/summary.json").read_text())["rows"]


def test_blocks_of_configuration() -> None:
    (body,) = [body for kind, _, body in BLOCKS if kind == "yaml"]
    Path("theirs.yaml").write_text(body, encoding="utf-8")
    config = load(RLConfig, "theirs.yaml")
    given = yaml.safe_load(body)["actor"]["kl"]["adaptive_kl"]
    assert (config.adaptive_kl.enabled, config.adaptive_kl.target_kl) == (True, given["target_kl"])
    assert set(config.multi_objective.objectives) == {"reward", "kl", "entropy"}
    finished("rl", "theirs.yaml", *TINY["rl"], "rollout.max_tokens=4", "run_dir=run")


def test_what_is_not_yet_is_refused_by_name() -> None:
    for word in ("tp_size=2", "memory_optimization.enabled=true", "hyperopt.n=3"):
        assert word.partition("=")[0].partition(".")[0] in TEXT or word.startswith("hyperopt")
        with pytest.raises(NovaError, match="not supported yet"):
            load(RLConfig, overrides=["task=sort", word])
