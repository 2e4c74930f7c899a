"""What a fresh clone relies on: ranges, pins, generated requirements, the page that explains them, make targets."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import novarl
from tools.make_requirements import requirements

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [
    requirement
    for line in [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    if (requirement := Requirement(line)).name != "novarl"
]


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines), (
        "a pin is name==version, no local part"
    )
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_requirements_txt_is_up_to_date() -> None:
    assert (ROOT / "requirements.txt").read_text() == requirements((ROOT / "pyproject.toml").read_text())
    checked = subprocess.run([sys.executable, ROOT / "tools/make_requirements.py", "--check"], capture_output=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("requirement", DIRECT, ids=str)
def test_every_direct_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    apart = pins("tests/trackers/constraints.txt")  # of the extra `track`, whose pins contradict the others
    assert {**apart, **pins()}[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("requirement", DIRECT, ids=str)
def test_every_direct_dependency_is_explained(requirement: Requirement) -> None:
    assert f"| `{requirement.name}` |" in (ROOT / "docs/dependencies.md").read_text()


def test_nothing_is_explained_that_is_not_a_dependency() -> None:
    explained = set(
        re.findall(
            r"^\|(?: `[a-z]+` \|)? `([A-Za-z0-9-]+)` \|", (ROOT / "docs/dependencies.md").read_text(), re.MULTILINE
        )
    )
    assert explained == {requirement.name for requirement in DIRECT}


def test_the_pins_are_what_is_installed_here() -> None:
    different = {
        name: (pin, found)
        for name, pin in pins().items()
        if (found := importlib.metadata.version(name).split("+")[0]) != pin
    }
    assert not different, f"pinned, installed: {different}; run `make setup`"


def test_no_extra_is_empty() -> None:
    assert set(EXTRAS) == {"llm", "dashboard", "track", "dev"}
    assert all(EXTRAS.values()), "an empty extra installs nothing in silence"


TARGETS = (
    "setup check demo train_smoke train_quick train_full lint test certificates test-kill test-real test-trl "
    "test-trackers bench-smoke dashboard report test-web bench-web tensorboard clean help"
)


@pytest.mark.parametrize("target", TARGETS.split(" "))
def test_make_knows_the_target_and_helps_with_it(target: str, tmp_path: Path) -> None:
    help_text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"make {target} " in help_text
    dry = ["make", "--dry-run", target, f"VENV={tmp_path / 'venv'}", "DATA=somewhere"]
    assert subprocess.run(dry, cwd=ROOT, capture_output=True).returncode == 0


def test_an_old_python_is_named_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    made = subprocess.run(
        ["make", "setup", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode != 0
    assert "NovaRL needs Python 3.11 or newer" in made.stderr
    assert not (tmp_path / "venv").exists()


def test_the_license_is_mit() -> None:
    assert PROJECT["license"] == "MIT"
    assert (ROOT / "LICENSE").read_text().startswith("MIT License\n\nCopyright (c) 2026 NovaRL contributors\n")


def test_the_wheel_holds_the_whole_package_and_runs(tmp_path: Path) -> None:
    source, ignored = tmp_path / "source", shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "novarl", source / "novarl", ignore=ignored)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("novarl-*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("novarl/")}
    assert shipped == {path.relative_to(source).as_posix() for path in (source / "novarl").rglob("*") if path.is_file()}
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    asked = [sys.executable, "-c", "import novarl, novarl.cli; print(novarl.__file__); novarl.cli.main(['--version'])"]
    said = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [str(tmp_path / "site/novarl/__init__.py"), f"novarl {novarl.__version__}"]
    assert (tmp_path / "site/bin/novarl").is_file()
