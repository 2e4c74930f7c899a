"""README.md and docs/ are true of the repository: links lead somewhere, the index is whole, commands are understood."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from novarl.compose.preference_plan import decided
from novarl.compose.resolve import resolve_rl
from novarl.config.load import load
from novarl.config.tree import TREES, RLConfig
from tests.compose.harness import ROOT, summary

DOCS = ROOT / "docs"
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "recipes/README.md", *sorted(DOCS.glob("*.md"))]
ARCHITECTURE = (DOCS / "architecture.md").read_text(encoding="utf-8")
FOR_READERS = [ROOT / "README.md", DOCS / "usage.md"]
MOST = 2500
"""Lines that one GRPO step may take to read."""


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        place = page.parent / name if name else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\]\(([\w/.]+)", (DOCS / "README.md").read_text(encoding="utf-8")))
    assert named >= {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    benchmarks = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    missing = {page.name for page in DOCS.glob("results/*.md")} - set(re.findall(r"results/([\w.-]+)\)", benchmarks))
    assert not missing


@pytest.mark.parametrize("page", FOR_READERS, ids=lambda page: page.stem)
def test_commands_are_understood(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = re.findall(r"^(?:torchrun .* -m )?novarl (\w+) ([^#\n]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) >= 3
    for command, text in found:
        words = shlex.split(text)
        tree = TREES["rl" if command == "explain" else command]
        file = words.pop(0) if words and "=" not in words[0] else None
        config = load(tree, file, words)
        if isinstance(config, RLConfig):
            resolve_rl(config)
        elif command in ("dpo", "rm"):
            decided(config)  # type: ignore[arg-type]


def test_the_lines_of_python_in_the_readme_train_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in first.splitlines() if line.strip()]) <= 6
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", first], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = summary(Path("runs/sort"))
    before, after = found["before"], found["after"]
    assert after["interval"][0] > before["interval"][1] and after["score"] > 0.5
    assert f"{before['score']} -> {after['score']}" in done.stdout
    assert Path("my-model/model.safetensors").is_file()


def test_the_table_of_packages_is_the_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    table = ARCHITECTURE.partition("| layer | contents |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")]
    shown = [name for row in rows for name in row]
    layers = [re.findall(r"\w+", layer) for layer in contract]
    height = {name: place for place, layer in enumerate(layers) for name in layer}
    assert sorted(shown) == sorted(height)
    assert all(
        height[above] <= height[below] or {above, below} == {"cli", "__main__"}
        for place, row in enumerate(rows)
        for above in row
        for lower in rows[place + 1 :]
        for below in lower
    )


def lines_of(path: Path, names: list[str]) -> int:
    """The lines of a file, or of the definitions in it that have these names, each of which there must be."""
    text = path.read_text(encoding="utf-8")
    if not names:
        return len(text.splitlines())
    found = {
        node.name: node.end_lineno - min([node.lineno, *(one.lineno for one in node.decorator_list)]) + 1
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno is not None
    }
    return sum(found[name] for name in names)


def test_one_grpo_step_can_be_read() -> None:
    listed = ARCHITECTURE.partition("<!-- reading:begin -->")[2].partition("<!-- reading:end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in listed.splitlines() if "| `" in line]
    total = 0
    for file, names, said in rows:
        count = lines_of(ROOT / "novarl" / file.strip("`"), re.findall(r"`(\w+)`", names))
        assert abs(count - int(said)) <= max(10, 0.15 * count), f"{file} has {count} lines"
        total += count
    assert len(rows) > 15 and total <= MOST
    stated = int(re.findall(r"about ([\d,]+) lines", ARCHITECTURE)[0].replace(",", ""))
    assert abs(total - stated) <= 150, total


def test_the_way_of_a_value_is_through_files_that_name_it() -> None:
    table = ARCHITECTURE.partition("## From key to loss")[2].partition("\n## ")[0]
    files = re.findall(r"^\| `([\w/.]+)`", table, re.MULTILINE)
    assert 5 <= len(files) <= 8
    assert all((ROOT / "novarl" / file).is_file() for file in files)
    naming = [file for file in files if re.search(r"clip_high|clip\.high|Clip", (ROOT / "novarl" / file).read_text())]
    assert {"config/algorithm.py", "algos/axes.py", "compose/merge.py", "algos/surrogates.py"} <= set(naming)
