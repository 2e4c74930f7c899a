from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from novarl.core.errors import NovaError
from novarl.data.sources import read

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hé\nllo"}], "answer": "1"},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}], "answer": "2"},
    {"messages": [{"role": "user", "content": '"quoted", 好'}], "answer": "3"},
]


def write(directory: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """`rows` in the format that the name says."""
    file = directory / name
    table = pa.Table.from_pylist(rows)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if name.endswith(".jsonl"):
        file.write_bytes(lines)
    elif name.endswith(".jsonl.gz"):
        file.write_bytes(gzip.compress(lines, mtime=0))
    elif name == "object.json":
        file.write_text(json.dumps({"version": {"n": [1]}, "data": rows, "total": 3}, indent=1), encoding="utf-8")
    elif name == "lines.json":
        file.write_bytes(lines)
    elif name.endswith(".json"):
        file.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    elif name.endswith(".csv"):
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(rows[0])
        writer.writerows(
            [json.dumps(value) if isinstance(value, list) else value for value in row.values()] for row in rows
        )
        file.write_text(out.getvalue(), encoding="utf-8")
    elif name.endswith(".parquet"):
        pq.write_table(table, file, row_group_size=2)
    else:
        make = pa.ipc.new_file if name == "file.arrow" else pa.ipc.new_stream
        with make(str(file), table.schema) as sink:
            sink.write_table(table, max_chunksize=2)
    return file


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        "a.jsonl.gz",
        "a.json",
        "object.json",
        "lines.json",
        "a.csv",
        "a.parquet",
        "file.arrow",
        "stream.arrow",
    ],
)
def test_every_file_type_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = list(read(write(tmp_path, name, ROWS)))
    assert [row.index for row in rows] == [0, 1, 2]
    assert all(row.error is None and row.where.startswith(f"{name}:") for row in rows)
    assert len({row.where for row in rows}) == 3
    values = [dict(row.value or {}) for row in rows]
    if name.endswith(".csv"):
        values = [value | {"messages": json.loads(value["messages"])} for value in values]
    assert values == ROWS


def test_where_names_the_line(tmp_path: Path) -> None:
    lines = b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}\r\n{"a": 3}'
    (tmp_path / "a.jsonl").write_bytes(lines)
    assert [(row.where, row.value) for row in read(tmp_path / "a.jsonl")] == [
        ("a.jsonl:1", {"a": 1}),
        ("a.jsonl:3", {"a": 2}),
        ("a.jsonl:4", {"a": 3}),
    ]
    (tmp_path / "a.json").write_text('{"n": {"x": [0]},\n "rows": [{"a": 1}, {"a":\n 2},\n\n {"a": 3}]}')
    assert [row.where for row in read(tmp_path / "a.json")] == ["a.json:2[0]", "a.json:2[1]", "a.json:5[2]"]
    (tmp_path / "a.csv").write_text('a,b\n"one\ntwo",2\n\n3,4\n')
    rows = list(read(tmp_path / "a.csv"))
    assert [row.where for row in rows] == ["a.csv:2", "a.csv:5"]
    assert rows[0].value == {"a": "one\ntwo", "b": "2"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{not json}", "not valid JSON"),
        (b'{"a": 1} {"b": 2}', "Extra data"),
        (b"[1, 2]", "not a list"),
        (b"null", "not null"),
        (b"true", "not a boolean"),
        (b'"text"', "not a string"),
        (b"17", "not a number"),
        (b'{"a": "\xff"}', "not valid UTF-8 at byte 8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not usable JSON"),
        (b"[" * 100_000, "not usable JSON"),
        (b'{"a": ' + b"[" * 150 + b"]" * 150 + b"}", "nested more than 100 levels deep"),
    ],
)
def test_a_bad_json_line_is_a_row_with_its_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    first, bad, last = read(tmp_path / "a.jsonl")
    assert (first.value, last.value) == ({"a": 1}, {"a": 3})
    assert (bad.value, bad.where) == (None, "a.jsonl:2")
    assert bad.error is not None and reason in bad.error


def test_bad_elements_of_a_json_array_are_rows_with_their_reasons(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": 1}, 5, {"a": "\\ud800"}, []]')
    assert [(row.where, row.error) for row in read(tmp_path / "a.json")] == [
        ("a.json:1[0]", None),
        ("a.json:1[1]", "a row must be an object, not a number"),
        ("a.json:1[2]", "contains a lone surrogate, which is not valid text"),
        ("a.json:1[3]", "a row must be an object, not a list"),
    ]


def test_blanks_beside_a_name_of_a_column_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt, answer\n2 + 2, 4\n")
    assert [row.value for row in read(tmp_path / "a.csv")] == [{"prompt": "2 + 2", "answer": " 4"}]


def test_bad_csv_rows_cost_only_themselves(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'a,b\n1,2\n3\n"stray,4\n5,6\n\xff,7\n8,9,10\n"x"y,11\n12,\n')
    found = {row.where: row.value or row.error for row in read(tmp_path / "a.csv")}
    assert found["a.csv:2"] == {"a": "1", "b": "2"}
    assert found["a.csv:3"] == "1 columns, but the header has 2"
    assert "not valid CSV" in str(found["a.csv:4"])
    assert found["a.csv:5"] == {"a": "5", "b": "6"}  # not swallowed by the stray quote of line 4
    assert found["a.csv:6"] == "not valid UTF-8 in column 'a'"
    assert found["a.csv:7"] == "3 columns, but the header has 2"
    assert "not valid CSV" in str(found["a.csv:8"])
    assert found["a.csv:9"] == {"a": "12", "b": None}
    assert len(found) == 8


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet", "a.arrow"])
def test_missing_and_empty_files_are_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(NovaError, match="no such file"):
        read(tmp_path / name)
    (tmp_path / name).touch()
    with pytest.raises(NovaError, match="empty"):
        read(tmp_path / name)


def test_a_misspelt_file_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(NovaError, match=r"did you mean .*train\.jsonl\?"):
        read(tmp_path / "trian.jsonl")
    with pytest.raises(NovaError, match="does not exist either"):
        read(tmp_path / "nowhere" / "train.jsonl")


@pytest.mark.parametrize(
    "path", ["", "x" * 5000, "~nobody-of-that-name/a.jsonl", "a\0b", "../../../no/such.jsonl", "@"]
)
def test_odd_paths_are_refused(path: str) -> None:
    with pytest.raises(NovaError):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.parquet", b"PAR1 this is no parquet PAR1", "damaged"),
        ("a.arrow", b"ARROW1 nor is this arrow", "damaged"),
        ("a.arrow", b"\xff\xff\xff\xff garbage of a stream", "damaged"),
        ("a.jsonl.gz", b"not gzip at all", "cannot be read completely"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000, mtime=0)[:-20], "cannot be read completely"),
        ("a.json", b'[{"a": 1},\n {"a": 2', "a.json:2: not valid JSON"),
        ("a.json", b'{"a": 1, "b": 2}', "an object with 0 lists"),
        ("a.json", b'{"a": [], "b": []}', "an object with 2 lists"),
        ("a.json", b'"text"', "a string, not a list of rows"),
        ("a.json", b'["\xff"]', "not UTF-8"),
        ("a.json", b"[" * 100_000, "not valid JSON"),
        ("a.json", b"[]", "is empty"),
        ("a.jsonl", b"\n\n", "is empty"),
        ("a.csv", b"a,b\n", "is empty"),
        ("a.csv", b"a,a\n1,2\n", "header"),
        ("a.csv", b"a,\n1,2\n", "header"),
        ("a.csv", b"\xff,b\n1,2\n", "header"),
        ("a.csv", b"\n\n", "header"),
        ("a.txt", b"some text", "unsupported file type"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(NovaError, match=reason):
        list(read(tmp_path / name))


def test_a_parquet_file_damaged_inside_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "a.parquet", [{"a": "x" * 50 + str(i)} for i in range(500)])
    content = bytearray(file.read_bytes())
    content[200:1200] = bytes(1000)
    file.write_bytes(content)
    with pytest.raises(NovaError, match="damaged"):
        list(read(file))


def test_columnar_values_come_as_json(tmp_path: Path) -> None:
    import datetime
    import decimal

    day, price = datetime.datetime(2026, 1, 2), decimal.Decimal("1.50")
    pq.write_table(pa.table({"t": [day], "d": [price], "b": [b"raw"], "n": [None], "f": [0.5]}), tmp_path / "a.parquet")
    (row,) = read(tmp_path / "a.parquet")
    assert row.value == {"t": "2026-01-02 00:00:00", "d": "1.50", "b": "raw", "n": None, "f": 0.5}


def test_saved_data_sets(tmp_path: Path) -> None:
    import datasets

    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:1])
    train.save_to_disk(str(tmp_path / "one"), num_shards=2)
    datasets.DatasetDict(train=train, test=test).save_to_disk(str(tmp_path / "two"))
    assert [row.value for row in read(tmp_path / "one")] == ROWS
    assert len({row.where for row in read(tmp_path / "one")}) == 3
    assert [row.value for row in read(tmp_path / "two")] == ROWS
    for spelling in (f"{tmp_path}/two@test", f"test@{tmp_path}/two"):
        assert [row.value for row in read(spelling)] == ROWS[:1]
    with pytest.raises(NovaError, match=r"has no split 'dev' .available: train, test"):
        read(tmp_path / "two", "dev")
    with pytest.raises(NovaError, match="has no splits"):
        read(tmp_path / "one", "test")
    next((tmp_path / "two" / "train").glob("*.arrow")).unlink()
    with pytest.raises(NovaError, match="missing"):
        read(tmp_path / "two")
    (tmp_path / "one" / "state.json").write_text('{"_data_files": [], "_indices_data_files": ["a.arrow"]}')
    with pytest.raises(NovaError, match="an indices mapping"):
        read(tmp_path / "one")
    (tmp_path / "one" / "state.json").write_text("{}")
    with pytest.raises(NovaError, match="lists no data files"):
        read(tmp_path / "one")


def test_shuffled_data_sets_are_saved_in_their_order(tmp_path: Path) -> None:
    import datasets

    shuffled = datasets.Dataset.from_list([{"i": i} for i in range(20)]).shuffle(seed=1).select(range(7))
    shuffled.save_to_disk(str(tmp_path / "d"))
    assert [row.value for row in read(tmp_path / "d")] == list(shuffled)


def test_a_folder_of_plain_files_is_read_one_after_another_and_names_bad_rows(tmp_path: Path) -> None:
    write(tmp_path, "b.jsonl", ROWS[:1])
    write(tmp_path, "a.jsonl", ROWS).open("a").write("{broken\n")
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".hidden.jsonl").write_text("{")
    rows = list(read(tmp_path))
    assert [row.value for row in rows] == [*ROWS, None, *ROWS[:1]]
    assert [row.where for row in rows][-2:] == [f"a.jsonl:{len(ROWS) + 1}", "b.jsonl:1"]
    assert rows[-2].error is not None and [row.index for row in rows] == list(range(len(rows)))
    assert [row.value for row in read(f"{tmp_path}@train")] == [row.value for row in rows]


def test_a_folder_of_splits_with_a_broken_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows", "train.jsonl", ROWS).open("a").write("{broken\n")
    with pytest.raises(NovaError, match=r"the directory could not be loaded as a dataset: .*JSON.*one at a time"):
        list(read(tmp_path / "rows"))


def test_a_directory_of_data_files_goes_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows", "train.jsonl", ROWS)
    write(tmp_path / "rows", "test.jsonl", ROWS[:1])
    rows = list(read(tmp_path / "rows"))
    assert [row.value for row in rows] == ROWS
    assert rows[0].where == "rows@train:1"
    assert [row.value for row in read(f"{tmp_path}/rows@test")] == ROWS[:1]


@pytest.mark.parametrize(
    ("path", "split", "asked"),
    [
        ("openai/gsm8k", None, ("openai/gsm8k", None, "train")),
        ("openai/gsm8k", "test", ("openai/gsm8k", None, "test")),
        ("openai/gsm8k@test", None, ("openai/gsm8k", None, "test")),
        ("test@openai/gsm8k", None, ("openai/gsm8k", None, "test")),
        ("openai/gsm8k:main@train[:10]", None, ("openai/gsm8k", "main", "train[:10]")),
        ("squad", None, ("squad", None, "train")),
    ],
)
def test_hub_ids(monkeypatch: pytest.MonkeyPatch, path: str, split: str | None, asked: tuple[str, ...]) -> None:
    import datasets

    calls = []

    def load(name: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
        calls.append((name, config, split))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = list(read(path, split))
    assert calls == [asked]
    assert [row.value for row in rows] == ROWS
    assert rows[1].where == f"{asked[0]}@{asked[2]}:2"


def test_a_hub_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        NovaError, match=r"no such file, and it could not be loaded as a dataset.*ConnectionError: no route to host"
    ):
        read("someone/something")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(NovaError, match=r"pip install 'novarl\[llm\]'"):
        read("someone/something")


def test_splits_that_make_no_sense_are_refused(jsonl: Any) -> None:
    with pytest.raises(NovaError, match="a file has no splits"):
        read(jsonl({"a": 1}), "train")
    with pytest.raises(NovaError, match="two splits"):
        read("openai/gsm8k@test", "train")


def test_a_file_whose_name_holds_an_at_sign_is_a_file(tmp_path: Path) -> None:
    assert len(list(read(write(tmp_path, "a@b.jsonl", ROWS)))) == 3
