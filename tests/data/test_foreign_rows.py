"""Rows as other projects publish them: what is read of them, what is refused by name, and what is said to be unused."""

from __future__ import annotations

from typing import Any

import pytest

from novarl.core.errors import NovaError
from novarl.data.dataset import load_rl, load_sft
from novarl.data.pairs import Reading, load_labelled, load_pairs
from novarl.data.sources import RawRow
from novarl.data.unused import Unused
from novarl.models.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def raw(*values: dict[str, Any]) -> list[RawRow]:
    return [RawRow(index, f"rows:{index + 1}", value) for index, value in enumerate(values)]


def turns(*texts: str, first: str = "user") -> list[dict[str, str]]:
    roles = {"user": ("user", "assistant"), "system": ("system", "user", "assistant")}[first]
    return [{"role": roles[index % len(roles)], "content": text} for index, text in enumerate(texts)]


def sft(value: dict[str, Any], **options: Any) -> tuple[str, str]:
    """(the whole text of a row as it is learnt, the part with loss)."""
    ((sequence,), _) = load_sft(raw(value), tokenizer=TOKENIZER, max_length=2000, **options)
    trained = [token for token, mine in zip(sequence.tokens, sequence.mask, strict=True) if mine]
    return TOKENIZER.decode(sequence.tokens), TOKENIZER.decode(trained)


def rl(value: dict[str, Any], **options: Any) -> Any:
    ((prompt,), _) = load_rl(raw(value), tokenizer=TOKENIZER, max_length=2000, **options)
    return prompt


def alike(value: dict[str, Any], standard: dict[str, Any]) -> None:
    """A row is learnt exactly as one in the standard form is."""
    assert sft(value) == sft(standard)


def test_alpaca_with_and_without_input() -> None:
    bare = {"instruction": "Name a colour.", "input": "", "output": "Red."}
    alike(bare, {"messages": turns("Name a colour.", "Red.")})
    full = {"instruction": "Translate.", "input": "Hund", "output": "dog"}
    alike(full, {"messages": turns("Translate.\n\nHund", "dog")})
    by_key = sft(full, prompt_key="instruction", completion_key="output")
    assert by_key == sft({"messages": turns("Translate.\n\nHund", "dog")})
    assert rl(full).messages == ({"role": "user", "content": "Translate.\n\nHund"},)
    (pair,), _ = load_pairs(
        raw({"instruction": "Translate.", "input": "Hund", "chosen": "dog", "rejected": "cat"}), Reading(TOKENIZER, 999)
    )
    assert "Translate.\n\nHund" in TOKENIZER.decode(pair.chosen.tokens)


def test_alpaca_input_needs_no_neighbour_of_another_name() -> None:
    """`input` belongs to `instruction`; beside a `prompt` it is just another column."""
    assert rl({"prompt": "Say it.", "input": "loud", "answer": "it"}).messages[0]["content"] == "Say it."


def test_sharegpt() -> None:
    said = [("system", "Be brief."), ("human", "One?"), ("gpt", "1"), ("human", "Two?"), ("gpt", "2")]
    row = {"conversations": [{"from": who, "value": text} for who, text in said]}
    roles = {"human": "user", "gpt": "assistant"}
    alike(row, {"messages": [{"role": roles.get(who, who), "content": text} for who, text in said]})
    asked = rl({"conversations": row["conversations"][:-1]})
    assert [m["role"] for m in asked.messages] == ["system", "user", "assistant", "user"]
    with pytest.raises(NovaError, match=r"conversations\[0\].from: unknown role 'martian'"):
        sft({"conversations": [{"from": "martian", "value": "x"}, {"from": "gpt", "value": "y"}]})
    silent = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1", "weight": 0}]
    more = [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2"}]
    assert sft({"conversations": silent + more})[1].startswith("2")


def test_sharegpt_system_column_and_pairs() -> None:
    row = {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"}], "system": "Be brief."}
    alike(row, {"messages": turns("Be brief.", "One?", "1", first="system")})
    pair = {
        "conversations": [{"from": "human", "value": "One?"}],
        "chosen": {"from": "gpt", "value": "1"},
        "rejected": {"from": "gpt", "value": "2"},
    }
    (found,), _ = load_pairs(raw(pair), Reading(TOKENIZER, 999))
    (same,), _ = load_pairs(raw({"prompt": "One?", "chosen": "1", "rejected": "2"}), Reading(TOKENIZER, 999))
    assert (found.chosen.tokens, found.rejected.tokens) == (same.chosen.tokens, same.rejected.tokens)


def test_openorca() -> None:
    row = {"id": "flan.1", "system_prompt": "Be brief.", "question": "One?", "response": "1"}
    alike(row, {"messages": turns("Be brief.", "One?", "1", first="system")})
    alike(row | {"system_prompt": ""}, {"messages": turns("One?", "1")})
    asked = rl(row, prompt_key="question", answer_key="response")
    assert [m["content"] for m in asked.messages] == ["Be brief.", "One?"] and asked.answer == "1"
    pairs = {"system": "Be brief.", "question": "One?", "chosen": "1", "rejected": "2"}
    (found,), _ = load_pairs(raw(pairs), Reading(TOKENIZER, 999))
    assert "Be brief." in TOKENIZER.decode(found.rejected.tokens)


def test_a_system_message_of_its_own_comes_before_the_column() -> None:
    told = turns("Mine.", "One?", "1", first="system")
    assert "Other" not in sft({"messages": told, "system": "Other."})[0]


def test_ultrafeedback_binarized() -> None:
    row = {
        "prompt": "One?",
        "prompt_id": "x",
        "chosen": turns("One?", "1"),
        "rejected": turns("One?", "2"),
        "messages": turns("One?", "1"),
        "score_chosen": 8.0,
        "score_rejected": 2.0,
    }
    unused = Unused()
    (found,), _ = load_pairs(raw(row), Reading(TOKENIZER, 999, unused=unused))
    (same,), _ = load_pairs(raw({"prompt": "One?", "chosen": "1", "rejected": "2"}), Reading(TOKENIZER, 999))
    assert found.chosen.tokens == same.chosen.tokens
    assert unused.notes() == ["unused data columns: messages, prompt_id, score_chosen, score_rejected"]
    assert rl(row).messages == ({"role": "user", "content": "One?"},)


def test_verl_rows() -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0, "answer": "2 + 2 = 4\n#### 4"},
    }
    assert rl(row).answer is None and rl(row).extra["reward_model"]["ground_truth"] == "4"
    assert rl(row, answer_key="reward_model.ground_truth").answer == "4"
    assert rl(row, answer_key="extra_info.answer").answer == "2 + 2 = 4\n#### 4"
    with pytest.raises(NovaError, match=r"answer_key=extra_info\.answers, but no row has that column"):
        rl(row, answer_key="extra_info.answers")
    with pytest.raises(NovaError, match=r"rows:2 extra_info.answer: is missing"):
        rows = raw(row, row | {"extra_info": {"index": 1}})
        load_rl(rows, tokenizer=TOKENIZER, max_length=2000, answer_key="extra_info.answer")


def test_a_column_whose_name_holds_a_dot_is_itself() -> None:
    assert rl({"prompt": "One?", "a.b": "1", "a": {"b": "2"}}, answer_key="a.b").answer == "1"


IMAGE = {"type": "image"}
TEXT = {"type": "text", "text": "What is this?"}


@pytest.mark.parametrize("name", ["image", "images", "video", "audio"])
def test_columns_that_are_not_text_are_refused(name: str) -> None:
    value: Any = [{"bytes": "x"}] if name == "images" else {"bytes": "x", "path": None}
    for load, row in (
        (sft, {"messages": turns("One?", "1")}),
        (rl, {"prompt": "One?"}),
        (rl, {"messages": turns("One?")}),
    ):
        with pytest.raises(NovaError, match=f"rows:1 {name}: is not text, and only text is supported"):
            load({**row, name: value})
        load({**row, name: [] if name == "images" else None})
    with pytest.raises(NovaError, match=f"rows:1 {name}: is not text"):
        load_pairs(raw({"prompt": "One?", "chosen": "1", "rejected": "2", name: value}), Reading(TOKENIZER, 999))
    with pytest.raises(NovaError, match=f"rows:1 {name}: is not text"):
        load_labelled(raw({"prompt": "One?", "completion": "1", "label": True, name: value}), Reading(TOKENIZER, 999))


def test_contents_in_parts() -> None:
    asked = [{"role": "user", "content": [TEXT, {"type": "text", "text": " Say."}]}]
    assert rl({"prompt": asked}).messages == ({"role": "user", "content": "What is this? Say."},)
    with pytest.raises(NovaError, match=r"prompt\[0\].content\[0\]: has type 'image', but only text is supported"):
        rl({"prompt": [{"role": "user", "content": [IMAGE, TEXT]}]})
    with pytest.raises(NovaError, match=r"completion\[0\].content\[0\]: has type 'image_url'"):
        parts = [{"type": "image_url", "image_url": {"url": "x"}}]
        sft({"prompt": "One?", "completion": [{"role": "assistant", "content": parts}]})


@pytest.mark.parametrize(
    ("load", "row", "why"),
    [
        (
            sft,
            {"prompt": "q", "completions": ["a", "b"], "labels": [True, False]},
            "step-level labels are not supported",
        ),
        (rl, {"text": "The sky is blue."}, "for texts without a prompt use novarl sft"),
        (sft, {"prompt": "The sky is"}, "for prompts without a completion use novarl rl"),
        (rl, {"chosen": "a b", "rejected": "a c"}, "use novarl dpo or novarl rm"),
        (sft, {"prompt": "a", "chosen": "b", "rejected": "c"}, "use novarl dpo or novarl rm"),
        (sft, {"instruction": "q", "models": ["x"], "completions": [{"response": "a"}]}, "use the binarized version"),
    ],
)
def test_rows_of_another_kind_are_named(load: Any, row: dict[str, Any], why: str) -> None:
    with pytest.raises(NovaError, match=f"no known format matches the columns: .*{why}"):
        load(row)


@pytest.mark.parametrize("load", [load_pairs, load_labelled])
def test_rows_of_another_kind_are_named_for_preferences(load: Any) -> None:
    with pytest.raises(NovaError, match="step-level labels are not supported"):
        load(raw({"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}), Reading(TOKENIZER, 999))
    with pytest.raises(NovaError, match="for rows with a single answer use novarl sft"):
        load(raw({"messages": turns("q", "a")}), Reading(TOKENIZER, 999))


def test_what_nothing_uses_is_collected_over_all_rows() -> None:
    unused = Unused()
    rows = raw(
        {"prompt": turns("a"), "answer": "1", "level": 1, "topic": "x", "empty": None},
        {"prompt": [{"role": "user", "content": "b", "name": "ann", "weight": 0}], "answer": "1", "late": 2},
    )
    load_rl(rows, tokenizer=TOKENIZER, max_length=99, unused=unused, template_kwargs={"enable_thinking": False})
    assert unused.notes({"topic"}) == [
        "unused data columns: late, level",
        "message keys that the chat template does not use: name",
        "keyword arguments that the chat template does not use: enable_thinking",
    ]
    assert unused.notes(None)[0].startswith("message keys that")


def test_columns_for_the_template_without_a_template() -> None:
    unused = Unused()
    row = {"prompt": "a", "tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": False}}
    load_rl(raw(row), tokenizer=TOKENIZER, max_length=99, unused=unused, apply_chat_template=False)
    expected = "(chat_template_kwargs and tools: for the chat template, which apply_chat_template=false disables)"
    assert unused.notes(()) == [f"unused data columns: chat_template_kwargs, tools {expected}"]
    assert unused.notes(None) == unused.notes(())


def test_nothing_is_said_where_everything_is_used() -> None:
    unused = Unused()
    load_sft(
        raw({"instruction": "a", "input": "b", "output": "c", "system": "d"}),
        tokenizer=TOKENIZER,
        max_length=99,
        unused=unused,
    )
    load_rl(
        raw({"prompt": "a", "info": {"x": "1"}}), tokenizer=TOKENIZER, max_length=99, answer_key="info.x", unused=unused
    )
    assert unused.notes() == []
