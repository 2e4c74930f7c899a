"""Rows of the built-in tasks: split, stable, and what the data room takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from novarl.core.errors import NovaError
from novarl.tasks.registry import TASKS, find_task
from novarl.tasks.task import Row

EXAMPLES = Path(__file__).parents[2] / "examples"


def questions(rows: list[Row]) -> list[str]:
    return [row["messages"][0]["content"] for row in rows]


@pytest.mark.parametrize("name", TASKS)
def test_train_and_held_out_never_share_a_problem(name: str) -> None:
    """For any numbers and seeds: demonstrations come from train problems too."""
    task = find_task(name)
    held_out = set(questions(task.rows("held_out")) + questions(task.rows("held_out", 500, seed=1)))
    train = set(questions(task.rows("train")) + questions(task.rows("train", 700, seed=1)))
    shown = set(questions(task.demonstrations(3000)) + questions(task.demonstrations(3000, seed=1)))
    assert len(held_out) >= 500 and len(train) >= 500
    assert held_out.isdisjoint(train | shown)


@pytest.mark.parametrize("name", TASKS)
def test_held_out_rows_are_five_hundred_different_ones(name: str) -> None:
    rows = find_task(name).rows("held_out")
    assert len(set(questions(rows))) == len(rows) == 500


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_well_formed_and_their_ids_stand(name: str) -> None:
    task = find_task(name)
    rows = task.rows("train", 30)
    assert [row["id"] for row in rows] == [f"{name}/train/{index}" for index in range(30)]
    assert rows[:10] == task.rows("train", 10), "fewer rows are the first of more"
    assert questions(rows) != questions(task.rows("train", 30, seed=1))
    assert task.rows("held_out", 1, seed=1)[0]["id"] == f"{name}/held_out-seed1/0"
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user"]
    json.dumps(rows)
    for index, row in enumerate(task.demonstrations(5)):
        assert row["id"] == f"{name}/demonstration/{index}"
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


def test_sort_holds_out_sets_of_letters() -> None:
    task = find_task("sort")
    answers = {split: {row["answer"] for row in task.rows(split)} for split in ("train", "held_out")}
    assert answers["train"].isdisjoint(answers["held_out"])


def test_rows_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "import hashlib, json; from novarl.tasks.registry import TASKS, find_task\n"
        "rows = [[find_task(name).rows('train', 50), find_task(name).demonstrations(50)] for name in TASKS]\n"
        "print(hashlib.sha256(json.dumps(rows).encode()).hexdigest())"
    )

    def digest(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert digest("1") == digest("2") != ""


def test_the_first_rows_are_these_for_ever() -> None:
    """Golden: a change here renames what logs, checkpoints and random streams refer to by id."""
    first = {name: questions(find_task(name).rows("train", 1))[0] for name in TASKS}
    assert first == {
        "sort": "sort: iebfc",
        "arithmetic": "3+8+3+3+8",
        "lexical": "Write ~12 words: the rainy valley",
        "sentiment": "Review the famous street.",
        "bandit": "Meda: Action 2 wins",
    }


def test_options_change_the_rows_and_the_name() -> None:
    assert find_task("sort", {"difficulty": 7}).rows("train", 1)[0]["id"] == "sort-7/train/0"
    assert questions(find_task("arithmetic", {"difficulty": 8}).rows("train", 1))[0].count("+") == 7
    assert "~100 words" in questions(find_task("lexical", {"words": 100}).rows("train", 1))[0]
    assert find_task("lexical", {"brevity_penalty_scale": 0}).name == "lexical"


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("srot", {}, "did you mean sort"),
        ("zzz", {}, "one of sort, arithmetic, lexical, sentiment, bandit"),
        ("sort", {"dificulty": 5}, "did you mean difficulty"),
        ("bandit", {"difficulty": 5}, "task=bandit has no options"),
        ("sort", {"difficulty": 99}, "task_options.difficulty: must be from 4 to 7, not 99"),
        ("sort", {"difficulty": "five"}, "is 'five', not a whole number"),
        ("sort", {"difficulty": 5.0}, "is 5.0, not a whole number"),
        ("sort", {"difficulty": True}, "is True, not a whole number"),
        ("lexical", {"brevity_penalty_scale": "x"}, "is 'x', not a number"),
        ("lexical", {"brevity_penalty_scale": float("nan")}, "must be from 0 to 100, not nan"),
    ],
)
def test_mistakes_are_said(name: str, options: dict[str, object], what: str) -> None:
    with pytest.raises(NovaError) as error:
        find_task(name, options)
    assert what in str(error.value)


def test_a_task_that_runs_out_says_so() -> None:
    with pytest.raises(NovaError, match=r"has only \d+ distinct held_out problems"):
        find_task("lexical").rows("held_out", 5000)
    with pytest.raises(NovaError, match="unknown split"):
        find_task("sort").rows("test")  # type: ignore[arg-type]


def test_the_example_bandit_is_the_task_bandit() -> None:
    packaged = Path(sys.modules["novarl.tasks.bandit"].__file__ or "").parent / "data" / "bandit.jsonl"
    assert packaged.read_bytes() == (EXAMPLES / "bandit" / "prompts.jsonl").read_bytes()
