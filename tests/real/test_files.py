"""Real files, row by row. `make test-real DATA=dir` runs this; `make test` needs no data and does not collect it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from novarl.data.dataset import RowCounts, load_rl, load_sft
from novarl.data.formats import BadRow
from novarl.data.pairs import Labelled, Reading, load_labelled, load_pairs
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.rewards.math import correct

DATA = Path(os.environ["NOVARL_DATA"])
TOKENIZER = ByteTokenizer()


@pytest.mark.parametrize("max_length", [256, 1024])
def test_gsm8k_every_row_is_accounted_for(max_length: int) -> None:
    file = DATA / "gsm8k-train.jsonl"
    load = {"tokenizer": ByteTokenizer(), "max_length": max_length, "max_bad_rows": 1.0}
    sequences, sft = load_sft(file, prompt_key="question", completion_key="answer", **load)
    prompts, rl = load_rl(file, prompt_key="question", answer_key="answer", **load)
    # A token a byte, and three more around the question, one after the answer: the counts can be worked out beside.
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    sizes = [(len(row["question"].encode()) + 3, len(row["answer"].encode()) + 1) for row in rows]
    without_answer = sum(question >= max_length for question, _ in sizes)
    cut = sum(question < max_length < question + answer for question, answer in sizes)
    assert sft == RowCounts(7473, 7473 - without_answer, cut, without_answer)
    too_long = sum(question > max_length for question, _ in sizes)
    assert rl == RowCounts(7473, 7473 - too_long, 0, too_long)
    assert (len(sequences), len(prompts)) == (sft.used, rl.used)
    assert all("####" in str(prompt.answer) for prompt in prompts)


def test_the_real_pairs_run_as_they_are_but_for_eight() -> None:
    file = DATA / "hh-harmless-pairs.jsonl"
    told: list[BadRow] = []
    pairs, counts = load_pairs(file, Reading(TOKENIZER, 4096, report=told.append))
    assert (counts.read, counts.used, counts.refused, len(pairs)) == (2000, 1992, 8, 1992)
    empty, apart = "the answer is empty", "has a different prompt than chosen"
    expected = dict.fromkeys((87, 517, 926, 1104), empty) | dict.fromkeys((1255, 1689, 1951, 1953), apart)
    assert {int(row.where.rpartition(":")[2]): row.reason for row in told} == expected
    assert {row.field for row in told} == {"chosen", "rejected"}


def test_the_real_reviews_are_labelled_texts() -> None:
    file = DATA / "movie-reviews.jsonl.gz"
    answers, counts = load_labelled(file, Reading(TOKENIZER, 256))
    labels = [row.label for (row,) in answers]
    assert counts.used == 1800 and 0.4 < sum(labels) / len(labels) < 0.6
    assert all(isinstance(row, Labelled) and row.plain for (row,) in answers)


def test_math_agrees_with_the_verdicts_on_four_thousand_solutions() -> None:
    rows = [json.loads(line) for line in (DATA / "gsm8k-model-solutions.jsonl").read_text("utf-8").splitlines()]
    found = [
        (correct(answer["solution"], row["ground_truth"]), float(answer["is_correct"]))
        for row in rows
        for answer in row.values()
        if isinstance(answer, dict)
    ]
    assert len(found) == 4000
    assert [given for given, _ in found] == [wanted for _, wanted in found]
