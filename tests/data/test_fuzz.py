"""Whatever a file holds, it is used, refused by row, or refused as a whole: never a traceback."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from novarl.core.errors import NovaError
from novarl.data.dataset import load_rl, load_sft
from novarl.data.sources import read
from novarl.models.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
FUZZ = settings(
    deadline=None,
    max_examples=150,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

KEYS = st.sampled_from(["messages", "prompt", "completion", "answer", "role", "content", "tool_calls", "name"])
TEXT = st.text(st.characters(), max_size=8) | st.sampled_from(["user", "assistant", "system", "<eos>", "\ud800", " "])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | TEXT, inner, max_size=4), max_leaves=12
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT | VALUES}) | VALUES, max_size=4)
GOOD = {"prompt": "q", "completion": "a", "answer": 1}


def assert_accounted(load: Any, file: Path, **options: Any) -> None:
    try:
        items, counts = load(file, tokenizer=TOKENIZER, max_length=64, max_bad_rows=1.0, **options)
    except NovaError as error:
        assert "\n" not in str(error)
        return
    assert counts.read == counts.used + counts.refused
    assert counts.used <= len(items)
    json.dumps([str(item) for item in items]).encode()


@FUZZ
@given(rows=st.lists(VALUES | st.dictionaries(KEYS, VALUES | MESSAGES), min_size=1, max_size=4))
def test_any_json_value_is_a_row(tmp_path: Path, rows: list[Any]) -> None:
    for name, text in (("a.json", json.dumps(rows)), ("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))):
        (tmp_path / name).write_text(text)
        assert_accounted(load_rl, tmp_path / name)
        assert_accounted(load_sft, tmp_path / name)


@FUZZ
@given(
    row=st.dictionaries(KEYS, VALUES | MESSAGES),
    template=st.booleans(),
    on_long=st.sampled_from(["truncate", "refuse"]),
)
def test_any_odd_row_among_good_ones(tmp_path: Path, row: Any, template: bool, on_long: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in [GOOD, row, GOOD]))
    for load in (load_rl, load_sft):
        items, counts = load(
            file, tokenizer=TOKENIZER, max_length=64, max_bad_rows=0.5, apply_chat_template=template, on_long=on_long
        )
        assert (counts.read, counts.used + counts.refused) == (3, 3)
        assert len(items) == counts.used >= 2


@FUZZ
@given(content=st.binary(min_size=1, max_size=200))
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow", "a.jsonl.gz"])
def test_any_bytes_are_a_file(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert_accounted(load_rl, tmp_path / name)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "file.arrow", "stream.arrow", "a.jsonl.gz"]
)
def test_damaged_files(tmp_path: Path, name: str) -> None:
    """200 good files of each kind with a few bytes changed, cut out or doubled."""
    whole = good_file(tmp_path / f"good-{name}").read_bytes()
    random.seed(0)
    outcomes = set()
    for _ in range(200):
        content = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            at, size = random.randrange(len(content)), random.randint(1, 6)
            content[at : at + size] = random.choice(
                [random.randbytes(size), b"", bytes(content[at : at + 2 * size]), b'"']
            )
        (tmp_path / name).write_bytes(content)
        try:
            bad = sum(row.error is not None for row in read(tmp_path / name))
            outcomes.add("some" if bad else "none")
        except NovaError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
        assert_accounted(load_rl, tmp_path / name)
    assert len(outcomes) >= 2, "the damage was never seen"


def good_file(file: Path) -> Path:
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": f"question {i}, é", "answer": str(i)} for i in range(6)]
    table = pa.Table.from_pylist(rows)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if file.name.endswith(".jsonl"):
        file.write_bytes(lines)
    elif file.name.endswith(".gz"):
        file.write_bytes(gzip.compress(lines))
    elif file.name.endswith(".json"):
        file.write_text(json.dumps(rows, indent=0))
    elif file.name.endswith(".csv"):
        file.write_text("prompt,answer\n" + "".join(f'"{row["prompt"]}",{row["answer"]}\n' for row in rows))
    elif file.name.endswith(".parquet"):
        pq.write_table(table, file)
    else:
        make = pa.ipc.new_file if "file" in file.name else pa.ipc.new_stream
        with make(str(file), table.schema) as sink:
            sink.write_table(table)
    return file
