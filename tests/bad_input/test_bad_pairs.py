"""Mistakes in preferences: one line and code 2, or rows that are skipped and counted; two thousand damaged rows."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from novarl.core.errors import NovaError
from novarl.data.formats import BadRow
from novarl.data.pairs import Reading, load_labelled, load_pairs
from novarl.models.byte_tokenizer import ByteTokenizer
from tests.bad_input.test_fuzzed_rows import damage, damaged_line, places
from tests.compose.harness import QUIET, events, novarl, snapshot, summary, write_rows

SMALL = ("batch_size=2", "steps=1", "eval.n=2", *QUIET)
TOKENIZER = ByteTokenizer()
Q = {"role": "user", "content": "What is 2 + 2?"}
FOUR, FIVE = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
GOOD: list[dict[str, Any]] = [
    {"prompt": "What is 1 + 1?", "chosen": "2", "rejected": "3", "margin": 1.5},
    {"chosen": [Q, FOUR], "rejected": [Q, FIVE]},
    {"messages": [Q], "chosen": "4", "rejected": "5"},
    {"chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5"},
    {"prompt": "What is 1 + 1?", "completion": "2", "label": True},
    {"text": "a fine film", "label": "positive"},
]
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
CASES: dict[str, tuple[str, list[Any], str]] = {
    "equal sides": ("dpo", [PAIR | {"rejected": "a"}], "rows.jsonl:1 rejected: is equal to chosen"),
    "an empty side": ("dpo", [PAIR | {"chosen": " "}], "rows.jsonl:1 chosen: is empty"),
    "no shared prompt": ("rm", [{"chosen": "one", "rejected": "two"}], "rejected: shares no prompt with the chosen"),
    "no pairs": ("dpo", [{"prompt": "q"}], "no known format matches the columns: prompt (set chosen_key"),
    "labels for a paired loss": ("dpo", GOOD[5:], "rows with a label need loss kto, bce"),
    "no labels for a labelled loss": ("dpo loss=kto", [{"prompt": "q"}], "or label_key and text_key"),
    "not a label": ("rm loss=bce", [{"text": "a", "label": "so so"}], "label: must be true or false, 1 or 0"),
    "one row for kto": ("dpo loss=kto", GOOD[4:5], "compares answers of different rows"),
    "a misspelt column": ("dpo chosen_key=chose", [PAIR], "chosen_key=chose, but no row has that column"),
    "columns of a task": ("dpo data=null task=sort chosen_key=a", [PAIR], "chosen_key=a is a column of a data file"),
    "two lengths": ("rm epochs=2", [PAIR], "steps=1 and epochs=2.0 both set the length of training"),
    "a key of another loss": ("dpo gamma=1", [PAIR], "gamma: loss=sigmoid does not use it"),
    "an unknown loss": ("dpo loss=sigmoyd", [PAIR], "did you mean sigmoid?"),
    "smoothing beyond a half": ("rm label_smoothing=0.5", [PAIR], "label_smoothing: must be below 0.5"),
    "beta of nothing": ("dpo beta=0", [PAIR], "beta: must be above 0"),
    "a length that holds no answer": ("dpo max_length=1", [PAIR], "no tokens of the answer within max_length=1"),
}


@pytest.mark.parametrize(("words", "rows", "said"), CASES.values(), ids=CASES)
def test_a_mistake_ends_with_one_line_and_leaves_the_disk_alone(
    words: str, rows: list[Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", rows)
    command, *more = words.split()
    before = snapshot(tmp_path)
    ended = novarl(command, *SMALL, "data=rows.jsonl", "run_dir=run", *more)
    assert ended.code == 2 and ended.err.count("\n") == 1 and ended.err.startswith("novarl: ")
    assert said in ended.err and snapshot(tmp_path) == before


def test_a_run_of_another_kind_is_not_gone_on_with(tmp_path: Path) -> None:
    data, run = write_rows(tmp_path / "rows.jsonl", [PAIR] * 20), tmp_path / "run"
    assert novarl("dpo", *SMALL, f"data={data}", f"run_dir={run}").code == 0
    ended = novarl("rm", *SMALL, f"data={data}", f"run_dir={run}", "resume=auto")
    assert ended.code == 2 and "the existing run is a novarl dpo run" in ended.err


@pytest.mark.parametrize("command", ["dpo", "rm"])
def test_bad_pairs_are_skipped_counted_and_named(command: str, tmp_path: Path) -> None:
    bad = [PAIR | {"rejected": "a"}, PAIR | {"chosen": ""}, PAIR | {"prompt": None}]
    data, run = write_rows(tmp_path / "rows.jsonl", [PAIR] * 20 + bad), tmp_path / "run"
    ended = novarl(command, *SMALL, f"data={data}", f"run_dir={run}", "max_bad_rows=0.2")
    assert ended.code == 0 and summary(run)["rows"]["refused"] == 3
    told = [(row["where"], row["field"], row["reason"]) for row in events(run, "bad_row")]
    assert told == [
        ("rows.jsonl:21", "rejected", "is equal to chosen"),
        ("rows.jsonl:22", "chosen", "is empty"),
        ("rows.jsonl:23", "prompt", "is null"),
    ]
    assert novarl(command, *SMALL, f"data={data}", f"run_dir={run}2").code == 2, "13 % are more than 1 %"


def damaged_lines(seed: int, count: int) -> list[bytes]:
    """Lines of one format, four of five of them with something wrong."""
    rng = random.Random(seed)
    usual, lines = GOOD[seed % len(GOOD)], []
    while len(lines) < count:
        row = json.loads(json.dumps(usual if rng.random() < 0.7 else rng.choice(GOOD)))
        if rng.random() < 0.6:
            damage(rng, row, *rng.choice(places(row)))
        line = damaged_line(rng, row)
        lines += [line] if line.strip() else []
    return lines


def assert_accounted(load: Callable[..., Any], file: Path, lines: int, **options: Any) -> str:
    """How the file ended. Whatever else is raised is a failure of the test."""
    refused: list[BadRow] = []
    try:
        items, counts = load(file, Reading(TOKENIZER, max_bad_rows=1.0, report=refused.append, **options))
    except NovaError as error:
        assert "\n" not in str(error) and error.fix
        return "refused as a positive integer"
    assert counts.read == counts.used + counts.refused == lines
    assert len(refused) == counts.refused and len(items) == counts.used > 0
    assert all(bad.where.startswith(f"{file.name}:") and bad.reason for bad in refused)
    return "some rows refused" if refused else "all rows used"


@pytest.mark.parametrize("load", [load_pairs, load_labelled], ids=["pairs", "labelled"])
@pytest.mark.parametrize("size", [1, 25])
def test_two_thousand_damaged_rows(load: Callable[..., Any], size: int, tmp_path: Path) -> None:
    """500 files of one row and 20 of twenty-five, for either purpose."""
    ends: Counter[str] = Counter()
    files = 500 // size
    for seed in range(files):
        file = tmp_path / f"{seed}.jsonl"
        lines = damaged_lines(seed, size)
        file.write_bytes(b"\n".join(lines) + b"\n")
        options = {
            "max_length": (200, 12)[seed % 4 == 0],
            "on_long": ("refuse", "truncate")[seed % 2],
            "apply_chat_template": seed % 3 > 0,
        }
        ends[assert_accounted(load, file, len(lines), **options)] += 1
    assert len(ends) >= 2, f"the damage is too one-sided: {ends}"


def test_runs_on_damaged_files(tmp_path: Path) -> None:
    """Twenty-four of them, from end to end, by every kind of learner."""
    ends: Counter[int] = Counter()
    commands = ("dpo", "dpo loss=kto", "rm", "rm loss=bce", "rm loss=implicit_ce", "dpo loss=orpo")
    for seed in range(24):
        folder = tmp_path / str(seed)
        folder.mkdir()
        file, run = folder / "rows.jsonl", folder / "run"
        file.write_bytes(b"\n".join(damaged_lines(seed // len(commands) + 3000, 30)) + b"\n")
        before = snapshot(folder)
        words = commands[seed % len(commands)].split()
        ended = novarl(*words, *SMALL, "max_bad_rows=0.9", f"data={file}", f"run_dir={run}")
        ends[ended.code] += 1
        if ended.code == 0:
            rows = summary(run)["rows"]
            assert rows["read"] == rows["used"] + rows["refused"] == 30 and ended.err == "", seed
        else:
            assert ended.err.startswith("novarl: ") and ended.err.count("\n") == 1, seed
            assert "Traceback" not in ended.err and snapshot(folder) == before, seed
    assert ends[0] >= 6 and ends[0] + ends[2] == 24, ends
