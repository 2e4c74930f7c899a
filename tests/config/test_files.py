"""Files and values: three formats, the same meaning, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from novarl.config.load import load
from novarl.config.tree import RLConfig
from novarl.core.config_files import dump, parse_value, read
from novarl.core.errors import NovaError

FORMATS = {
    "c.yaml": "task: sort\noptim: {lr: 1e-5, betas: [0.9, 0.99]}\nrollout:\n  stop: [END]\nkeep_best: false\n",
    "c.toml": 'task = "sort"\nkeep_best = false\n[optim]\nlr = 1e-5\nbetas = [0.9, 0.99]\n[rollout]\nstop = ["END"]\n',
    "c.json": json.dumps(
        {"task": "sort", "optim": {"lr": 1e-5, "betas": [0.9, 0.99]}, "rollout": {"stop": ["END"]}, "keep_best": False}
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_three_formats_mean_the_same(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(FORMATS[name])
    config = load(RLConfig, file)
    assert (config.task, config.optim.lr, config.optim.betas, config.keep_best) == ("sort", 1e-5, (0.9, 0.99), False)
    assert config.rollout.stop == ("END",)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),  # text to YAML 1.1
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("010", 10),  # eight to YAML 1.1
        ("0x10", 16),
        ("0o17", 15),
        ("yes", "yes"),  # true to YAML 1.1
        ("no", "no"),
        ("2024-01-01", "2024-01-01"),  # a date to YAML 1.1
        ("1:30", "1:30"),  # ninety to YAML 1.1
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("'1'", "1"),
        ("[1e-3, a]", [1e-3, "a"]),
        ("{a: 1e3}", {"a": 1e3}),
        ("file.py:name", "file.py:name"),
        ("a: b", "a: b"),
        ("# no comment", "# no comment"),
    ],
)
def test_values_have_no_surprises(text: str, value: Any) -> None:
    found = parse_value(text, "here")
    assert found == value and type(found) is type(value)
    if not text.startswith(("#", "a:")):
        assert _read_yaml(f"key: {text}\n") == {"key": value}


@pytest.mark.parametrize("text", [".inf", "-.Inf", ".NaN", "1e999"])
def test_numbers_that_are_not_finite_are_refused(text: str) -> None:
    assert isinstance(parse_value(text, ""), float)
    with pytest.raises(NovaError, match="must be a finite number"):
        load(RLConfig, overrides=["task=sort", f"rollout.temperature={text}"])


@given(
    st.dictionaries(
        st.text(st.characters(categories=("L", "Nd")), min_size=1, max_size=8),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=12))
        | st.lists(st.text(max_size=6), max_size=3),
        min_size=1,
        max_size=6,
    )
)
def test_whatever_is_dumped_is_read_back(mapping: dict[str, Any]) -> None:
    assert _read_yaml(dump(mapping)) == mapping


def test_lines_of_keys_are_known(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("# a comment\ntask: sort\noptim:\n\n  lr: 1\n")
    assert read(file) == ({"task": "sort", "optim": {"lr": 1}}, {"task": 2, "optim": 3, "optim.lr": 5})


def test_a_text_key_takes_its_override_literally() -> None:
    config = load(RLConfig, overrides=["task=sort", "run_dir=2024", "model=[odd]", "answer_key=null"][:3])
    assert (config.run_dir, config.model) == ("2024", "[odd]")
    assert load(RLConfig, overrides=["task=sort", "run_dir=x", "run_dir=null"]).run_dir is None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.yaml", None, "no such configuration file"),
        ("empty.yaml", "", "the file is empty"),
        ("blank.json", " \n", "the file is empty"),
        ("comments.yaml", "# nothing\n", "contains only comments"),
        ("list.yaml", "- a\n- b\n", "found a list"),
        ("text.yaml", "hello\n", "found a text"),
        ("number.json", "3", "found a number"),
        ("broken.yaml", "task: sort\nsteps: [1, 2\n", r"broken.yaml:3: not YAML"),
        ("tabs.yaml", "optim:\n\tlr: 1\n", r"tabs.yaml:2: not YAML"),
        ("two.yaml", "task: sort\n---\ntask: sort\n", "not YAML"),
        ("broken.json", '{"task": "sort",\n}', r"broken.json:2: not JSON"),
        ("broken.toml", "task = sort\n", "not TOML"),
        ("huge.json", '{"seed": ' + "9" * 5000 + "}", "not JSON"),
        ("twice.yaml", "steps: 1\ntask: sort\nsteps: 2\n", r"twice.yaml:3: the key steps is defined twice"),
        ("inner.yaml", "optim:\n  lr: 1\n  lr: 2\n", r"inner.yaml:3: the key lr is defined twice"),
        ("twice.json", '{"steps": 1, "steps": 2}', "the key steps is defined twice"),
        ("twice.toml", "steps = 1\nsteps = 2\n", "not TOML"),
        ("key.yaml", "task: sort\n[a, b]: 1\n", r"key.yaml:2: keys must be strings"),
        ("tag.yaml", "task: !!python/name:os.system\n", r"tag.yaml:1: unknown type"),
        ("loop.yaml", "task: &a [*a]\n", r"loop.yaml:1: an alias refers to a node that contains it"),
        (
            "bomb.yaml",
            "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
            "more than 10,000 values",
        ),
        ("deep.yaml", "a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("deep.json", '{"a": ' * 30000, "nested too deeply"),
        ("dots.toml", ".".join("a" * 20_000) + "=1", "nested too deeply"),
        ("dots.toml", ".".join("a" * 200) + "=1", "nested too deeply"),
        ("control.yaml", "task: so\x00rt\n", "not YAML"),
        ("config.ini", "[a]\n", "a configuration must be a YAML, TOML or JSON file"),
        ("folder.yaml", ..., "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(name: str, content: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if content is ...:
        file.mkdir()
    elif content is not None:
        file.write_text(content)
    with pytest.raises(NovaError, match=said) as caught:
        load(RLConfig, file)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(b"task: s\xff\n")
    with pytest.raises(NovaError, match="not UTF-8"):
        load(RLConfig, file)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_bytes('{"task": "sort"}'.encode("utf-8-sig"))
    assert load(RLConfig, file).task == "sort"


def _read_yaml(text: str) -> dict[str, Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "c.yaml"
        file.write_bytes(text.encode())
        return read(file)[0]
