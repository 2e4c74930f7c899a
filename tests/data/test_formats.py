from __future__ import annotations

from typing import Any

import pytest

from novarl.core.errors import NovaError
from novarl.data.formats import BadRow, Columns, Purpose, Refused, detect, rl_example, sft_example
from novarl.data.sources import RawRow

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}


def rows(*values: Any) -> list[RawRow]:
    return [RawRow(i, f"f.jsonl:{i + 1}", value, None if value else "broken") for i, value in enumerate(values)]


def found(purpose: Purpose, *values: Any, **keys: str) -> Columns:
    return detect(rows(*values), purpose, keys=Columns(**keys), where="f.jsonl")


def test_sft_formats_are_detected() -> None:
    assert found("sft", {"messages": [USER, ASSISTANT]}) == Columns(messages="messages")
    assert found("sft", {"prompt": "q", "completion": "a"}) == Columns(prompt="prompt", completion="completion")
    assert found("sft", {"prompt": "q", "response": "a"}) == Columns(prompt="prompt", completion="response")
    # a bare prompt beside the conversation is nothing to learn from
    assert found("sft", {"prompt": "q", "messages": [USER, ASSISTANT]}) == Columns(messages="messages")


def test_rl_formats_are_detected() -> None:
    assert found("rl", {"messages": [USER]}) == Columns(messages="messages")
    assert found("rl", {"messages": [USER], "answer": 1}) == Columns(messages="messages", answer="answer")
    assert found("rl", {"prompt": "q"}) == Columns(prompt="prompt")
    assert found("rl", {"prompt": [USER], "answer": 1}) == Columns(prompt="prompt", answer="answer")
    assert found("rl", {"prompt": "q", "completion": "a"}) == Columns(prompt="prompt")


def test_keys_name_any_columns() -> None:
    row = {"question": "q", "solution": "a", "chat": [USER], "answer": 3}
    keys = {"prompt_key": "question", "completion_key": "solution"}
    assert found("sft", row, prompt="question", completion="solution") == Columns(
        prompt=keys["prompt_key"], completion=keys["completion_key"]
    )
    assert found("sft", row | {"completion": "a"}, prompt="question").completion == "completion"
    assert found("rl", row, messages="chat") == Columns(messages="chat", answer="answer")
    assert found("rl", row, prompt="question", answer="solution") == Columns(prompt="question", answer="solution")


def test_odd_first_rows_do_not_decide() -> None:
    odd: dict[str, Any] = {"prompt": "q", "messages": None}
    assert (
        found("rl", None, odd, {"messages": [USER]}, {"messages": [USER]}, {"messages": [USER]}).messages == "messages"
    )


def test_an_answer_that_few_rows_have_is_only_another_column() -> None:
    assert found("rl", {"prompt": "q", "answer": 1}, {"prompt": "q"}, {"prompt": "q"}).answer is None


@pytest.mark.parametrize(
    ("purpose", "row", "keys", "words"),
    [
        ("sft", {"question": "q", "solution": "a"}, {}, "no known format matches the columns: question, solution"),
        ("sft", {"question": "q", "solution": "a"}, {}, "set messages_key, or prompt_key and completion_key"),
        ("rl", {"question": "q"}, {}, "set messages_key or prompt_key, and answer_key"),
        ("sft", {"prompt": "q"}, {}, "no known format"),
        ("sft", {"question": "q", "solution": "a"}, {"prompt": "question"}, "no known format"),
        ("rl", {"prompt": "q", "messages": [USER]}, {}, "more than one format"),
        ("sft", {"prompt": "q", "completion": "a", "messages": [USER]}, {}, "more than one format"),
        ("rl", {"question": "q"}, {"prompt": "qestion"}, "prompt_key=qestion.*did you mean 'question'"),
        ("rl", {"prompt": "q"}, {"answer": "zzz"}, "answer_key=zzz.*columns: prompt"),
        ("rl", {"a": 1, "b": 2}, {"messages": "a", "prompt": "b"}, "cannot both be set"),
    ],
)
def test_formats_that_cannot_be_told_are_refused(purpose: Purpose, row: Any, keys: Any, words: str) -> None:
    with pytest.raises(NovaError, match=words):
        found(purpose, row, **keys)


def test_nothing_readable_is_refused() -> None:
    with pytest.raises(NovaError, match=r"no row could be read: f\.jsonl:1: broken"):
        found("rl", None, None)


def refusal(purpose: Purpose, value: Any, columns: Columns) -> str:
    example = sft_example if purpose == "sft" else rl_example
    with pytest.raises(Refused) as caught:
        example(RawRow(0, "f.jsonl:1", value), columns)
    return str(BadRow("f.jsonl:1", caught.value.field, caught.value.reason)).removeprefix("f.jsonl:1 ")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "messages: is missing"),
        ({"messages": None}, "messages: is null"),
        ({"messages": 3}, "messages: must be a list of messages, not a number"),
        ({"messages": "plain"}, "messages: must be a list of messages, or such a list as JSON, not plain text"),
        ({"messages": "{}"}, "messages: must be a list of messages, not an object"),
        ({"messages": {}}, "messages: must be a list of messages, not an object"),
        ({"messages": []}, "messages: is an empty list"),
        ({"messages": ["x"]}, "messages[0]: must be an object with role and content, not a string"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: is missing"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role: must be a string, not a list"),
        (
            {"messages": [USER, {"role": "usr", "content": "x"}]},
            "messages[1].role: unknown role 'usr', not one of system, developer, user, assistant, tool",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content: must be a string, not a list"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "messages[0].content: is empty"),
        (
            {"messages": [USER, ASSISTANT]},
            "messages[1].role: ends with an assistant turn: remove the last turn, or use novarl sft",
        ),
        ({"messages": [USER]}, "answer: is missing"),
        ({"messages": [USER], "answer": None}, "answer: is null"),
    ],
)
def test_rl_rows_are_refused_with_field_and_reason(value: Any, reason: str) -> None:
    assert refusal("rl", value, Columns(messages="messages", answer="answer")) == reason


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"p": 1, "c": "a"}, "p: must be a string or a list of messages, not a number"),
        ({"p": "q"}, "c: is missing"),
        ({"p": "", "c": "a"}, "p: is empty"),
        ({"p": [], "c": "a"}, "p: is an empty list"),
        ({"p": "q", "c": [USER]}, "c: has no assistant turn to train on"),
        ({"p": [USER, ASSISTANT], "c": "a"}, "p: the prompt ends with an assistant turn"),
    ],
)
def test_sft_pairs_are_refused_with_field_and_reason(value: Any, reason: str) -> None:
    assert refusal("sft", value, Columns(prompt="p", completion="c")) == reason


def test_sft_conversations_need_an_assistant_turn_that_answers() -> None:
    columns = Columns(messages="messages")
    assert refusal("sft", {"messages": [USER]}, columns) == "messages: has no assistant turn to train on"
    assert "begins with an assistant turn" in refusal("sft", {"messages": [ASSISTANT, USER, ASSISTANT]}, columns)


def test_good_rows() -> None:
    example = sft_example(RawRow(0, "f:1", {"p": "q", "c": "a", "id": 7}), Columns(prompt="p", completion="c"))
    assert (example.id, example.messages, example.context) == ("f:1", (USER, ASSISTANT), 1)
    pair = {"p": [USER, ASSISTANT, USER], "c": [ASSISTANT, USER, ASSISTANT]}
    assert sft_example(RawRow(0, "f:1", pair), Columns(prompt="p", completion="c")).context == 3
    row = {"prompt": "q", "answer": [1], "level": 2}
    example = rl_example(RawRow(0, "f:1", row), Columns(prompt="prompt", answer="answer"))
    assert (example.messages, example.answer, example.extra) == ((USER,), [1], {"level": 2})


def test_an_answer_column_of_another_name_stays_for_rewards_that_know_it_by_name() -> None:
    example = rl_example(RawRow(0, "f:1", {"q": "q", "solution": "4"}), Columns(prompt="q", answer="solution"))
    assert (example.answer, example.extra) == ("4", {"solution": "4"})


def test_messages_may_be_json_text_as_csv_needs_it() -> None:
    row = {"messages": '[{"role": "user", "content": "q"}]'}
    assert rl_example(RawRow(0, "f:1", row), Columns(messages="messages")).messages == (USER,)


def test_nulls_in_messages_are_absent_and_tool_calls_need_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None}
    example = sft_example(RawRow(0, "f:1", {"messages": [USER, call]}), Columns(messages="messages"))
    assert example.messages[1] == {"role": "assistant", "content": "", "tool_calls": call["tool_calls"]}
