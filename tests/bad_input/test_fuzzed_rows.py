"""Two thousand damaged rows, alone and in files, and runs on such files: used, refused, or one line and code 2."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from novarl.core.errors import NovaError
from novarl.data.dataset import load_rl, load_sft
from novarl.data.formats import BadRow
from novarl.models.byte_tokenizer import ByteTokenizer
from tests.compose.harness import RL, SFT, novarl, snapshot, summary

TOKENIZER = ByteTokenizer()
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
REPLY = {"role": "assistant", "content": "4"}
GOOD: list[dict[str, Any]] = [
    {"prompt": "What is 1 + 1?", "completion": "2", "answer": "2"},
    {"prompt": CHAT, "completion": [REPLY], "answer": 4},
    {"messages": [*CHAT, REPLY, {"role": "user", "content": "Sure?"}, REPLY]},
    {"messages": CHAT, "answer": {"value": 4}},
]
ODD: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e308, 2**70, "", " ", "\t\n", "text", "é\u2028\x00", "\ud800", "<eos><|user|>"),
    *("x" * 3000, [], {}, [[]], [None], ["text"], [{}], [{"role": "user"}], {"role": "user", "content": "a"}),
    *([REPLY], [REPLY, REPLY]),
    *([{"role": "usr", "content": "a"}], [{"role": "user", "content": None}], [{"role": ["user"], "content": "a"}]),
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    {"a": {"b": [{"c": [[[]]]}]}},
]
NAMES = ["prompt", "completion", "messages", "answer", "response", "text", "", "Prompt", "extra", "role", "content"]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in ((value, key), *places(item))]


def damage(rng: random.Random, row: dict[str, Any], holder: Any, key: Any) -> None:
    """Replace, remove, move or wrap the value at `holder[key]` inside the row, or add another beside it."""
    ways: list[Callable[[], object]] = [
        lambda: holder.__setitem__(key, copy.deepcopy(rng.choice(ODD))),
        lambda: holder.pop(key),
        lambda: row.__setitem__(rng.choice(NAMES), holder.pop(key)),
        lambda: holder.__setitem__(key, [holder[key]]),
        lambda: row.__setitem__(rng.choice(NAMES), copy.deepcopy(rng.choice(ODD))),
    ]
    rng.choice(ways)()


def damaged(rng: random.Random, row: dict[str, Any]) -> Any:
    """A row with one to three things wrong with its values, or something else in its place."""
    if rng.random() < 0.05:
        return rng.choice(ODD)
    row = copy.deepcopy(row)
    for _ in range(rng.randint(1, 3)):
        row = row or {"prompt": "What?"}
        damage(rng, row, *rng.choice(places(row)))
    return row


def damaged_line(rng: random.Random, row: Any) -> bytes:
    """A row as a line of JSON; in one of five, something is wrong with the line itself."""
    line = json.dumps(row, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.8:
        return line
    at = rng.randrange(len(line) + 1)
    junk = rng.choice(
        [b"{", b"}", b'"', b"\\", b"\xff\xfe", b"\x00", b",", b"NaN", b"\xef\xbb\xbf", b"1" * 5000, b"[" * 2000]
    )
    return rng.choice([line[:at], line[at:], line[:at] + junk + line[at:], line[:at] + line[at + 3 :], line + line])


def damaged_lines(seed: int, count: int) -> list[bytes]:
    """Lines that each hold something; half of them are of one format, so that one is found."""
    rng = random.Random(seed)
    usual, lines = rng.choice(GOOD), []
    while len(lines) < count:
        row = usual if rng.random() < 0.5 else rng.choice(GOOD)
        line = damaged_line(rng, damaged(rng, row) if rng.random() < 0.8 else row)
        lines += [line] if line.strip() else []
    return lines


def assert_accounted(load: Callable[..., Any], file: Path, lines: int, **options: Any) -> str:
    """How the file ended. Whatever else is raised is a failure of the test."""
    refused: list[BadRow] = []
    try:
        items, counts = load(
            file, tokenizer=TOKENIZER, max_length=200, max_bad_rows=1.0, report=refused.append, **options
        )
    except NovaError as error:
        assert "\n" not in str(error) and error.fix
        return "refused as a positive integer"
    assert counts.read == counts.used + counts.refused == lines
    assert len(refused) == counts.refused and len(items) >= counts.used > 0
    assert all(bad.where.startswith(f"{file.name}:") and bad.reason and "\n" not in bad.where for bad in refused)
    return "some rows refused" if refused else "all rows used"


@pytest.mark.parametrize("load", [load_rl, load_sft], ids=["rl", "sft"])
@pytest.mark.parametrize("size", [1, 40])
def test_two_thousand_damaged_rows(load: Callable[..., Any], size: int, tmp_path: Path) -> None:
    """500 files of one row and 50 of forty, for either purpose."""
    ends: Counter[str] = Counter()
    files = 500 if size == 1 else 50
    for seed in range(files):
        file = tmp_path / f"{seed}.jsonl"
        lines = damaged_lines(seed, size)
        file.write_bytes(b"\n".join(lines) + b"\n")
        options = {"on_long": ("refuse", "truncate")[seed % 2], "apply_chat_template": seed % 3 > 0}
        ends[assert_accounted(load, file, len(lines), **options)] += 1
    assert len(ends) >= 2 and min(ends.values()) >= files // 50, f"the damage is too one-sided: {ends}"


def test_runs_on_damaged_files(tmp_path: Path) -> None:
    """Thirty of them, from end to end."""
    ends: Counter[int] = Counter()
    for seed in range(30):
        folder = tmp_path / str(seed)
        folder.mkdir()
        file, run = folder / "rows.jsonl", folder / "run"
        file.write_bytes(b"\n".join(damaged_lines(1000 + seed, 30)) + b"\n")
        command = ("sft", *SFT) if seed % 2 else ("rl", *RL, "reward=length")
        extra = (f"max_bad_rows={(0.9, 0.3)[seed % 5 == 0]}", f"on_long={('refuse', 'truncate')[seed % 4 < 2]}")
        before = snapshot(folder)
        ended = novarl(*command, *extra, f"data={file}", f"run_dir={run}")
        ends[ended.code] += 1
        if ended.code == 0:
            rows = summary(run)["rows"]
            assert rows["read"] == rows["used"] + rows["refused"] == 30 and ended.err == "", seed
        else:
            assert ended.err.startswith("novarl: ") and ended.err.count("\n") == 1, seed
            assert "Traceback" not in ended.err and snapshot(folder) == before, seed
    assert ends[0] >= 10 and ends[2] >= 5 and ends[0] + ends[2] == 30, ends
