from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from novarl.core.errors import NovaError
from novarl.data.dataset import RowCounts, load_rl, load_sft
from novarl.data.formats import BadRow
from novarl.data.sources import RawRow
from novarl.models.byte_tokenizer import ByteTokenizer

GOOD = {"prompt": "question", "completion": "answer"}
BAD = {"prompt": "question", "completion": ""}


def test_rl_prompts(jsonl: Any) -> None:
    tok = ByteTokenizer()
    message = {"role": "user", "content": "2+2"}
    file = jsonl({"messages": [message], "answer": "4", "level": 1}, {"messages": [message], "answer": "5"})
    prompts, counts = load_rl(file, tokenizer=tok, max_length=100)
    assert counts == RowCounts(read=2, used=2, truncated=0, refused=0)
    assert [prompt.id for prompt in prompts] == ["rows.jsonl:1", "rows.jsonl:2"]
    assert tok.decode(prompts[0].tokens) == "<|user|>2+2<eos><|assistant|>"
    assert (prompts[0].messages, prompts[0].answer, prompts[0].extra) == ((message,), "4", {"level": 1})


def test_sft_sequences(jsonl: Any, trained: Any) -> None:
    tok = ByteTokenizer()
    (sequence,), counts = load_sft(jsonl(GOOD), tokenizer=tok, max_length=100)
    assert counts == RowCounts(1, 1, 0, 0)
    assert tok.decode(sequence.tokens) == "<|user|>question<eos><|assistant|>answer<eos>"
    assert trained(tok, sequence.tokens, sequence.mask) == ["answer<eos>"]
    assert set(sequence.behavior_logp) == {0.0}


def test_bad_rows_are_skipped_reported_and_counted(jsonl: Any, tokenizer: Any) -> None:
    told: list[BadRow] = []
    file = jsonl(GOOD, b"{oops", *[GOOD] * 10, BAD)
    sequences, counts = load_sft(file, tokenizer=tokenizer, max_length=99, max_bad_rows=0.2, report=told.append)
    assert counts == RowCounts(read=13, used=11, truncated=0, refused=2)
    assert len(sequences) == 11
    assert [str(bad) for bad in told] == [
        "rows.jsonl:2: not valid JSON: Expecting property name enclosed in double quotes at column 2",
        "rows.jsonl:13 completion: is empty",
    ]


def test_too_many_bad_rows_stop_and_tell_nobody_else(jsonl: Any, tokenizer: Any) -> None:
    told: list[BadRow] = []
    file = jsonl(*[GOOD] * 95, *[BAD] * 5)
    with pytest.raises(NovaError) as caught:
        load_sft(file, tokenizer=tokenizer, max_length=99, report=told.append)
    text = str(caught.value)
    assert "5 of 100 rows cannot be used" in text and "max_bad_rows=0.01" in text
    assert "rows.jsonl:96 completion: is empty; rows.jsonl:97" in text and "\n" not in text
    assert told == []
    assert load_sft(file, tokenizer=tokenizer, max_length=99, max_bad_rows=0.05)[1].refused == 5


def test_the_share_of_bad_rows_is_exact(jsonl: Any, tokenizer: Any) -> None:
    file = jsonl(*[GOOD] * 71, *[BAD] * 29)
    assert load_sft(file, tokenizer=tokenizer, max_length=99, max_bad_rows=0.29)[1].refused == 29
    with pytest.raises(NovaError):
        load_sft(file, tokenizer=tokenizer, max_length=99, max_bad_rows=0.2899)


def test_no_usable_row_is_an_error_whatever_is_allowed(jsonl: Any, tokenizer: Any) -> None:
    with pytest.raises(NovaError, match="2 of 2 rows"):
        load_sft(jsonl(BAD, BAD), tokenizer=tokenizer, max_length=99, max_bad_rows=1.0)


def test_long_sft_rows_lose_their_tail(jsonl: Any, trained: Any) -> None:
    tok = ByteTokenizer()
    rows = [{"prompt": "q", "completion": "x" * n} for n in (3, 4, 50)]
    header = len("q") + 3  # <|user|> <eos> <|assistant|>
    sequences, counts = load_sft(jsonl(*rows), tokenizer=tok, max_length=header + 4)
    assert counts == RowCounts(read=3, used=3, truncated=2, refused=0)
    texts = [trained(tok, sequence.tokens, sequence.mask) for sequence in sequences]
    assert texts == [["xxx<eos>"], ["xxxx"], ["xxxx"]]


def test_texts_are_learnt_whole_where_nothing_else_can_be_read(jsonl: Any) -> None:
    tok = ByteTokenizer()
    (text,), _ = load_sft(jsonl({"text": "abc", "label": 1}), tokenizer=tok, max_length=99)
    assert tok.decode(text.tokens) == "abc<eos>" and text.mask == (False, True, True, True)
    (text,), counts = load_sft(jsonl({"body": "abcdef"}), tokenizer=tok, max_length=4, text_key="body")
    assert tok.decode(text.tokens) == "abcd" and counts.truncated == 1
    (talk,), _ = load_sft(jsonl({"text": "abc", **GOOD}), tokenizer=tok, max_length=99)
    assert "abc" not in tok.decode(talk.tokens), "a row of two formats is a conversation"
    with pytest.raises(NovaError, match="text: must be a string, not a number"):
        load_sft(jsonl({"text": 5}), tokenizer=tok, max_length=99)
    with pytest.raises(NovaError, match="text_key is for texts without a prompt"):
        load_sft(jsonl({"text": "abc", **GOOD}), tokenizer=tok, max_length=99, text_key="text", prompt_key="prompt")


def test_an_sft_row_with_nothing_left_to_learn_is_refused(jsonl: Any) -> None:
    file = jsonl({"prompt": "q", "completion": "a"}, {"prompt": "q" * 50, "completion": "a"})
    told: list[BadRow] = []
    load = {"tokenizer": ByteTokenizer(), "max_length": 20, "max_bad_rows": 0.5}
    sequences, counts = load_sft(file, report=told.append, **load)
    assert (len(sequences), counts) == (1, RowCounts(read=2, used=1, truncated=0, refused=1))
    assert str(told[0]) == "rows.jsonl:2 completion: no tokens to train on within max_length=20"


def test_long_sft_rows_are_refused_on_request(jsonl: Any) -> None:
    file = jsonl({"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "a" * 50})
    told: list[BadRow] = []
    load = {"tokenizer": ByteTokenizer(), "max_length": 20, "max_bad_rows": 0.5, "on_long": "refuse"}
    _, counts = load_sft(file, report=told.append, **load)
    assert counts == RowCounts(read=2, used=1, truncated=0, refused=1)
    assert "the row has 55 tokens, more than max_length=20" in str(told[0])


def test_long_prompts_are_refused_never_silently_cut(jsonl: Any) -> None:
    file = jsonl({"prompt": "short"}, {"prompt": "long " * 10 + "end"})
    told: list[BadRow] = []
    load = {"tokenizer": ByteTokenizer(), "max_length": 20}
    with pytest.raises(NovaError, match="the prompt has 56 tokens, more than max_length=20"):
        load_rl(file, **load)
    prompts, counts = load_rl(file, max_bad_rows=0.5, report=told.append, **load)
    assert (len(prompts), counts) == (1, RowCounts(read=2, used=1, truncated=0, refused=1))
    assert (told[0].where, told[0].field) == ("rows.jsonl:2", "prompt")
    prompts, counts = load_rl(file, on_long="truncate", **load)
    assert counts == RowCounts(read=2, used=2, truncated=1, refused=0)
    assert len(prompts[1].tokens) == 20
    assert ByteTokenizer().decode(prompts[1].tokens).endswith("long end<eos><|assistant|>")


def test_a_row_may_give_several_sequences_and_counts_once(jsonl: Any, with_template: Any) -> None:
    turns = ["q1", "<think>t</think>a1", "q2", "a2"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    sequences, counts = load_sft(jsonl({"messages": messages}), tokenizer=with_template("forgetful"), max_length=999)
    assert (len(sequences), counts) == (2, RowCounts(1, 1, 0, 0))


def test_rows_of_a_program_are_loaded_alike(tokenizer: Any) -> None:
    rows = [RawRow(0, "sort/train/0", {"messages": [{"role": "user", "content": "x"}], "answer": 1, "n": 2})]
    (prompt,), _ = load_rl(rows, tokenizer=tokenizer, max_length=99)
    assert (prompt.id, prompt.answer, prompt.extra) == ("sort/train/0", 1, {"n": 2})
    with pytest.raises(NovaError, match="no row could be read"):
        load_rl([], tokenizer=tokenizer, max_length=99)


def test_nothing_predicts_a_first_token_so_it_is_never_trained_on(jsonl: Any, tokenizer: Any) -> None:
    original = tokenizer.encode
    tokenizer.encode = lambda text, add_special_tokens: original(text.replace("question", ""))
    (sequence,), _ = load_sft(jsonl(GOOD), tokenizer=tokenizer, max_length=99, apply_chat_template=False)
    assert tokenizer.decode(sequence.tokens) == "answer<eos>"
    assert sequence.mask == (False, *[True] * 6)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_length", 0), ("max_bad_rows", -0.1), ("max_bad_rows", 1.5), ("max_bad_rows", float("nan"))],
)
def test_limits_out_of_range_are_refused(jsonl: Any, tokenizer: Any, name: str, value: float) -> None:
    for load in (load_rl, load_sft):
        with pytest.raises(NovaError, match=name):
            load(jsonl(GOOD), **{"tokenizer": tokenizer, "max_length": 9} | {name: value})


def test_reading_data_imports_nothing_heavy() -> None:
    code = (
        "import sys, novarl.data.dataset, novarl.data.stream, novarl.data.buffer;"
        "print({'torch', 'transformers', 'pyarrow', 'datasets', 'numpy', 'pydantic'} & set(sys.modules))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, text=True)
    assert out.stdout == "set()\n"
