"""Which rows of a data file are held out."""

from __future__ import annotations

from pathlib import Path

import pytest

from novarl.build.rows import set_aside, sft_rows
from novarl.config.tree import SFTConfig
from novarl.models.load import load
from tests.build.harness import write_rows


@pytest.mark.parametrize("sizes", [[1] * 40, [3] * 40, [1 + row % 4 for row in range(47)]])
@pytest.mark.parametrize("most", [1, 3, 500])
def test_a_row_stays_on_one_side(sizes: list[int], most: int) -> None:
    items = [(row, piece) for row, size in enumerate(sizes) for piece in range(size)]
    train, held_out = set_aside(items, most, sizes)
    assert sorted(train + held_out) == items
    assert train == sorted(train) and held_out == sorted(held_out)
    rows = [{row for row, _ in side} for side in (train, held_out)]
    assert not rows[0] & rows[1], "a row is learnt from and measured on"
    assert len(rows[1]) == min(most, len(sizes) // 10), "what is asked for are rows"


def test_where_a_row_is_one_item_nothing_else_need_be_said() -> None:
    items = list(range(40))
    assert set_aside(items, 3) == set_aside(items, 3, [1] * 40)
    assert set_aside(items[:9], 3) == (items[:9], [])


FORGETFUL = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}"
    "{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Like Qwen3's: a turn's thoughts are there while it is the last one, and gone afterwards."""


def test_the_sequences_of_a_conversation_are_all_learnt_from_or_all_measured_on(tmp_path: Path) -> None:
    def talk(name: str) -> dict[str, object]:
        turns = [f"{name} first", f"<think>hm</think>{name} one", f"{name} second", f"<think>hm</think>{name} two"]
        return {"messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]}

    data = write_rows(tmp_path / "rows.jsonl", (talk(f"row{number:02d}") for number in range(40)))
    policy = load("tiny", seed=0)
    policy.tokenizer.chat_template = FORGETFUL
    rows = sft_rows(SFTConfig(data=str(data), eval={"n": 3}), None, policy)
    assert (len(rows.train), len(rows.held_out), rows.counts.used) == (2 * 37, 2 * 3, 40)

    def names(side: list[object]) -> set[str]:
        return {policy.tokenizer.decode(sequence.tokens).partition("row")[2][:2] for sequence in side}

    assert len(names(rows.train)) == 37 and len(names(rows.held_out)) == 3
    assert not names(rows.train) & names(rows.held_out)
