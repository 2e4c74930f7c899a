"""docs/getting_started.md is run as it is written, top to bottom, in a copy of what it names; each block keeps its
promise."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.compose.harness import ROOT, metrics, summary

PAGE = ROOT / "docs" / "getting_started.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
RUN = [(kind, body) for kind, body in BLOCKS if kind in ("bash", "python")]
DONE = "@@ the block has ended @@"
INTERPRETER = f"""
import json, sys
names = {{"__name__": "__main__"}}
for line in sys.stdin:
    exec(compile(json.loads(line), "docs/getting_started.md", "exec"), names)
    print({DONE!r}, flush=True)
"""


class Reader:
    """Somebody with one shell and one Python open, in the repository's root."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self._programs = {
            kind: subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for kind, command in (("bash", ["bash", "-e"]), ("python", [sys.executable, "-c", INTERPRETER]))
        }

    def run(self, kind: str, body: str) -> str:
        """What a block prints. A block that fails ends its program."""
        program = self._programs[kind]
        assert program.stdin is not None and program.stdout is not None
        program.stdin.write(f"{body}\necho '{DONE}'\n" if kind == "bash" else json.dumps(body) + "\n")
        program.stdin.flush()
        printed = ""
        for line in program.stdout:
            if line.strip() == DONE:
                return printed
            printed += line
        raise AssertionError(f"{body}\nended its program:\n{printed}")

    def close(self) -> None:
        for program in self._programs.values():
            program.kill()
            program.communicate()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """In a copy of what the page names. `make setup` finds a virtualenv that is installed: this one."""
    folder = tmp_path
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "novarl" / "core").mkdir(parents=True)
    shutil.copy(ROOT / "novarl/core/processor.py", folder / "novarl/core")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (folder / ".venv" / ".installed").touch()
    environment = {name: value for name, value in os.environ.items() if name not in ("VENV", "MAKEFLAGS")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    there = Reader(folder, environment)
    yield there
    there.close()


def rose(run: Path) -> bool:
    """Whether the held-out score after lies beyond the interval of the one before."""
    found = summary(run)
    return bool(found["after"]["interval"][0] > found["before"]["interval"][1])


def shown(after: str) -> str:
    """The block of output that the page shows after a block."""
    return next(body for (_, before), (_, body) in pairwise(BLOCKS) if before == after)


def is_installed(reader: Reader, body: str, printed: str) -> bool:
    return Path(reader.run("bash", "command -v novarl").strip()).parent.samefile(Path(sys.executable).parent)


def is_shown(reader: Reader, body: str, printed: str) -> bool:
    return printed == shown(body)


def learnt_the_form(reader: Reader, body: str, printed: str) -> bool:
    found = summary(reader.folder / "runs/form")
    return rose(reader.folder / "runs/form") and found["before"]["score"] < -5 and found["after"]["score"] > -0.3


def learnt_the_sounds(reader: Reader, body: str, printed: str) -> bool:
    found = summary(reader.folder / "runs/sounds")
    assert found["before"]["score"] < 0.1 and found["after"]["score"] > 0.9
    return rose(reader.folder / "runs/sounds")


def answers_and_is_measured(reader: Reader, body: str, printed: str) -> bool:
    asked, _, measured = printed.partition("Evaluation")
    score = re.search(r"score +([\d.]+)", measured)
    return "moo" in asked.splitlines() and score is not None and float(score[1]) > 0.85 and "pass@4" in measured


def went_on(reader: Reader, body: str, printed: str) -> bool:
    steps = [row["step"] for row in metrics(reader.folder / "runs/sounds")]
    return steps == list(range(1, 46))


def prefers(reader: Reader, body: str, printed: str) -> bool:
    return rose(reader.folder / "runs/preferred") and "chosen" in printed.splitlines()[0]


def learnt_in_few_lines(reader: Reader, body: str, printed: str) -> bool:
    assert len([line for line in body.splitlines() if line.strip()]) <= 12
    return rose(reader.folder / "runs/in-python")


def generated_and_saved(reader: Reader, body: str, printed: str) -> bool:
    *_, scores, texts = printed.splitlines()
    before, after = map(float, scores.split(" -> "))
    assert after - before > 0.4 and texts == "['moo', 'woof']"
    return (reader.folder / "models/sounds/model.safetensors").is_file()


def was_read(reader: Reader, body: str, printed: str) -> bool:
    series, *rows = printed.splitlines()
    rewards = json.loads(series)
    assert len(rewards) == 40 and sum(rewards[-5:]) > sum(rewards[:5]) + 1
    assert len(rows) == 4 and all(re.fullmatch(r"Pupil \d+: \w+\? .* [01]\.0 -?[\d.e-]+", row) for row in rows)
    return int(reader.run("python", "print(sum(figure.is_file() for figure in figures))")) == 1


def stopped_early(reader: Reader, body: str, printed: str) -> bool:
    steps = metrics(reader.folder / "runs/watched")
    assert steps[-1]["reward_mean"] > 0.5 and all(row["reward_mean"] <= 0.5 for row in steps[:-1])
    return 1 < len(steps) < 40 and summary(reader.folder / "runs/watched")["status"] == "stopped"


def resumed(reader: Reader, body: str, printed: str) -> bool:
    steps = [row["step"] for row in metrics(reader.folder / "runs/watched")]
    return steps == list(range(1, len(steps) + 1)) and "resum" in printed.lower()


PROMISES: list[Callable[[Reader, str, str], bool]] = [
    is_installed,
    is_shown,
    learnt_the_form,
    is_shown,
    learnt_the_sounds,
    answers_and_is_measured,
    went_on,
    prefers,
    learnt_in_few_lines,
    generated_and_saved,
    was_read,
    stopped_early,
    resumed,
]
"""What each block that is run promises, in the page's order."""


def test_every_block_is_run_or_is_what_one_prints() -> None:
    assert len(RUN) == len(PROMISES) and {kind for kind, _ in BLOCKS} == {"bash", "python", "json", "text"}
    outputs: list[Any] = [body for kind, body in BLOCKS if kind in ("json", "text")]
    assert outputs == [shown(body) for (_, body), kept in zip(RUN, PROMISES, strict=True) if kept is is_shown]


def test_every_block_keeps_its_promise(reader: Reader) -> None:
    for (kind, body), kept in zip(RUN, PROMISES, strict=True):
        printed = reader.run(kind, body)
        assert kept(reader, body, printed), f"{kept.__name__}: {body}\nprinted:\n{printed}"
