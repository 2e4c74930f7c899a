"""Two thousand damaged configurations: each is a valid tree or one NovaError, never another exception."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from novarl.config.base import Config
from novarl.config.foreign.aliases import READ_TOGETHER, RUN_NAMES
from novarl.config.foreign.tables import rows
from novarl.config.keys import keys, sections
from novarl.config.load import load, to_yaml
from novarl.config.tree import TREES
from novarl.core.errors import NovaError

SHIPPED = {file: file.read_text() for file in sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, 1e-5, -0.0, 1e300, 2**63, 10**30, float("inf"), float("nan")),
    *("", "auto", "none", "mean", "loss", "k1", "group", "1e5", "file.py:name", "ü\n\x85", "x" * 5000, "a=b: {c"),
    *([], [1], ["a", ["b"]], [[[]]], {}, {"a": 1}, {"a": {"b": {"c": None}}}, {"source": "x", "weight": "y"}, {"": {}}),
]
NAMES = [row.old for row in rows()] + list(READ_TOGETHER) + list(RUN_NAMES)
NAMES += ["kind", "x", "", ".", "a..b", "optim.", "ключ"]


def damaged_text(rng: random.Random, kind: str) -> str:
    """A shipped file, mostly of the right kind, with a few characters or lines gone wrong."""
    fitting = [text for text in SHIPPED.values() if f"kind: {kind}\n" in text or rng.random() < 0.1]
    text = rng.choice(fitting or list(SHIPPED.values()))
    for _ in range(rng.randint(1, 3)):
        at, lines = rng.randrange(len(text) + 1), text.splitlines(keepends=True) or [""]
        damage = [
            text[:at] + rng.choice("{}[]:#&*!|>'\"%@`-,?\t\n \x00\u2028é0e.") + text[at:],
            text[:at] + text[at + rng.randint(1, 5) :],
            text[:at],
            text + rng.choice(lines),
            "".join(rng.sample(lines, len(lines))),
            text.replace(": ", rng.choice([":", ": *", ": &a ", ": !!int ", ": [", ": |\n  "]), 1),
        ]
        text = rng.choice(damage)
    return text


def damaged_tree(rng: random.Random, tree: type[Config]) -> dict[str, Any]:
    """Random values at random keys, nested or dotted, many of them good ones."""
    own = keys(tree)
    found: dict[str, Any] = {"model": "tiny"}
    if "task" in own:
        found |= rng.choice([{"task": "sort"}, {"data": "x"}, {}])
    for _ in range(rng.randint(0, 4)):
        name = rng.choice(list(own) if rng.random() < 0.7 else [*sections(tree), *NAMES])
        value = own[name].default if name in own and rng.random() < 0.5 else rng.choice(VALUES)
        head, _, rest = name.partition(".")
        if rest and rng.random() < 0.5 and isinstance(found.setdefault(head, {}), dict):
            found[head][rest] = value
        else:
            found[name] = value
    return found


def one(rng: random.Random, folder: Path) -> Config:
    tree = rng.choice(list(TREES.values()))
    names = [*keys(tree), *NAMES]
    overrides = [f"{rng.choice(names)}={str(rng.choice(VALUES))[:80]}" for _ in range(rng.choice([0, 0, 0, 2]))]
    way = rng.random()
    if way > 0.7:
        return load(tree, None, overrides, preset=damaged_tree(rng, tree))
    file = folder / ("fuzz.yaml" if way < 0.4 else "fuzz.json")
    text = damaged_text(rng, tree.kind) if way < 0.4 else json.dumps(damaged_tree(rng, tree))
    file.write_text(text, encoding="utf-8")
    return load(tree, file, overrides)


def test_two_thousand_damaged_configurations(tmp_path: Path) -> None:
    rng = random.Random(20)
    ends: Counter[str] = Counter()
    for _ in range(2000):
        try:
            config = one(rng, tmp_path)
        except NovaError as error:
            assert str(error) and "\n" not in str(error) and error.fix
            ends[error.what.split()[0]] += 1
        else:
            file = tmp_path / "again.yaml"
            file.write_text(to_yaml(config), encoding="utf-8")
            assert load(type(config), file) == config.with_notes(())
            ends["valid"] += 1
    assert ends["valid"] >= 200 and len(ends) >= 20, f"the damage is too one-sided to find anything: {ends}"
