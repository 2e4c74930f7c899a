"""The pages of the algorithms: one for every row and loss, true of the table, the glossary and the command line."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from novarl.algos import preference_losses as preference
from novarl.algos.named import ALGORITHMS
from novarl.compose.preference_plan import decided
from novarl.compose.resolve import resolve_rl
from novarl.config.load import load
from novarl.config.tree import TREES, RLConfig
from novarl.observe.glossary import lookup
from novarl.observe.stability import RULES
from novarl.observe.stability.page import tables

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/algorithms"
PAGES = sorted(FOLDER.glob("*.md"))
METRIC = re.compile(r"^\* `([^`]+)`:", re.MULTILINE)
COMMAND = re.compile(r"^novarl (\w+) (.*)$", re.MULTILINE)
ROW = re.compile(r"^\| \w+ \| `([\w.]+)` \| `([^`]*)`", re.MULTILINE)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_algorithm_table", ROOT / "tools/make_algorithm_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def text(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def test_every_row_and_every_loss_has_its_page(tool: ModuleType) -> None:
    assert set(tool.DPO_LOSSES) == set(preference.LOSSES)
    wanted = {*ALGORITHMS, "sft", "README"}
    wanted |= {f"dpo_{name}" for name in tool.DPO_LOSSES} | {f"rm_{name}" for name in tool.RM_LOSSES}
    assert {page.stem for page in PAGES} == wanted
    links = set(re.findall(r"\]\((\w+)\.md\)", text("README")))
    assert links == wanted - {"README"}


def test_what_is_generated_is_what_the_code_says(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--check"]) == 0, capsys.readouterr().err
    row = ALGORITHMS["dapo"]
    shown = text("dapo")
    for changed in (replace(row, settings={}), replace(row, surrogate="gspo"), replace(row, updates_per_rollout=1)):
        assert tool.filled(shown, tool.row_table(changed)) != shown


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_values_of_a_page_as_overrides_are_the_row(name: str) -> None:
    row, found = ALGORITHMS[name], dict(ROW.findall(text(name)))
    assert {"adv.estimator", "loss.surrogate", "kl.type", "loss.agg", "updates_per_rollout"} <= found.keys()
    written = [f"{key}={value}" for key, value in found.items() if value != "null"]
    config = load(RLConfig, overrides=["task=sort", f"algo={name}", *written])
    assert resolve_rl(config).algorithm == row
    assert row.paper.rpartition("/")[2] in text(name)
    assert "../results/learning.md" in text(name) and "../results/learning.png" in text(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_metric_is_in_the_glossary(page: Path) -> None:
    names = METRIC.findall(page.read_text(encoding="utf-8"))
    assert len(names) >= 4
    for name in names:
        lookup(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_understood(page: Path) -> None:
    commands = COMMAND.findall(page.read_text(encoding="utf-8"))
    assert commands
    for command, words in commands:
        config = load(TREES[command], overrides=shlex.split(words))
        if isinstance(config, RLConfig):
            resolve_rl(config)
        elif command in ("dpo", "rm"):
            decided(config)  # type: ignore[arg-type]
        if page.stem.startswith((f"{command}_", "dpo_", "rm_")):
            assert page.stem == f"{command}_{config.loss}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        assert (page.parent / target).exists(), target


def test_cloning_is_policy_gradient_with_advantage_one() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", text("sft"), re.DOTALL)
    exec(compile(snippet, "docs/algorithms/sft.md", "exec"), {})
    wrong = snippet.replace("torch.ones_like(logp)", "0.9 * torch.ones_like(logp)")
    assert wrong != snippet
    with pytest.raises(AssertionError):
        exec(compile(wrong, "sft.md, changed", "exec"), {})


def test_the_page_on_stability_names_metrics_and_keys_that_there_are() -> None:
    page = (ROOT / "docs/stability.md").read_text(encoding="utf-8")
    signs = page[page.index("## Signs and causes") :]
    rows = [line.split(" | ") for line in signs.splitlines() if line.startswith("| `")]
    assert len(rows) >= 8
    config = load(RLConfig, None, ["task=sort"])
    for sign, _, remedy in rows:
        for name in re.findall(r"`([a-z_/]+)`", sign):
            assert name in ("loss",) or lookup(name), name
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)(?:=[^`]*)?`", remedy):
            value: object = config
            for part in key.split("."):
                assert hasattr(value, part), key
                value = getattr(value, part)


def test_the_page_on_stability_has_every_alert() -> None:
    page = (ROOT / "docs/stability.md").read_text(encoding="utf-8")
    written = page[page.index("<!-- alerts:begin -->\n") : page.index("<!-- alerts:end -->")]
    assert written.removeprefix("<!-- alerts:begin -->\n") == tables(), "python -m novarl.observe.stability.page"


def test_what_to_try_names_keys_that_there_are() -> None:
    config = load(RLConfig, None, ["task=sort"])
    named = [(rule, key) for rule in RULES.values() for key in re.findall(r"\b([a-z_]+\.[a-z_]+)\b", rule.fix)]
    assert len(named) >= 10
    for rule, key in named:
        section, name = key.split(".")
        assert name in type(getattr(config, section)).model_fields, f"{rule.name}: {key}"
