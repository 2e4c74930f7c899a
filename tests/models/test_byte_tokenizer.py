"""The byte tokenizer: every text round-trips, and Hugging Face reads the saved files to the same thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings, strategies as st
from transformers import AutoTokenizer

from novarl.core.errors import NovaError
from novarl.models import byte_tokenizer
from novarl.models.byte_tokenizer import SPECIALS, ByteTokenizer

TEXTS = st.lists(st.one_of(st.text(), st.sampled_from(SPECIALS), st.just("<eos"), st.just(" \r\n\t"))).map("".join)
CHAT = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": " what is 2+2? "},
    {"role": "assistant", "content": "4"},
    {"role": "tool", "content": "{}"},
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("tokenizer")
    ByteTokenizer().save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_any_text_round_trips(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_auto_tokenizer_gives_the_same_ids(theirs, text: str) -> None:
    assert ByteTokenizer().encode(text) == theirs.encode(text) == theirs.encode(text, add_special_tokens=False)


@given(ids=st.lists(st.integers(0, 319)), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_auto_tokenizer_gives_the_same_text(theirs, ids: list[int], skip: bool) -> None:
    """Whatever a model may sample: broken UTF-8, special tokens, rows of the embedding that have no token."""
    ours = ByteTokenizer().decode(ids, skip_special_tokens=skip)
    assert ours == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("prompt", [False, True])
def test_auto_tokenizer_gives_the_same_chat(theirs, prompt: bool) -> None:
    ours = ByteTokenizer()
    text = ours.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    assert text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    assert text.startswith("<|system|>Be brief.\n<eos><|user|> what is 2+2? <eos><|assistant|>4<eos>")
    assert text.endswith("<eos><|assistant|>" if prompt else "<|tool|>{}<eos>")
    tokens = ours.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=prompt)
    assert tokens == dict(theirs.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=prompt))


@pytest.mark.parametrize(
    ("arguments", "given"),
    [({"b": 1, "a": "<é>"}, '{"b": 1, "a": "<é>"}'), ('{"a": 1}', '{"a": 1}'), (None, "{}")],
)
def test_tools_calls_and_results_are_shown(theirs, arguments: Any, given: str) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"z": {}, "a": {}}}}
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "I ask.", "tool_calls": [call, {"name": "add", "arguments": arguments}]},
        {"role": "tool", "name": "add", "content": "3"},
    ]
    text = ByteTokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True, tools=[tool])
    assert text == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, tools=[tool])
    one = f'<tool_call>{{"name": "add", "arguments": {given}}}</tool_call>'
    declared = '[{"type": "function", "function": {"name": "add", "parameters": {"z": {}, "a": {}}}}]'
    assert text == (
        f"<|system|>tools: {declared}<eos><|user|>q<eos><|assistant|>I ask.{one}{one}<eos><|tool|>3<eos><|assistant|>"
    )


turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={"content": st.one_of(st.text(), st.none(), st.lists(st.text(max_size=3))), "name": st.text(max_size=3)},
)


@settings(max_examples=200, deadline=None)
@given(messages=st.lists(turns, max_size=4), prompt=st.booleans())
def test_what_is_written_is_what_the_template_says(messages: list[Any], prompt: bool) -> None:
    sandbox = byte_tokenizer._compiled()
    written = ByteTokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert written == sandbox(messages=messages, add_generation_prompt=prompt)


def test_another_template_is_followed() -> None:
    ours = ByteTokenizer()
    ours.chat_template = "{{ messages[0]['content'] }}!"
    assert ours.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x!"


def test_auto_tokenizer_knows_the_special_tokens(theirs) -> None:
    ours = ByteTokenizer()
    assert (theirs.pad_token_id, theirs.eos_token_id, len(theirs)) == (ours.pad_token_id, ours.eos_token_id, len(ours))
    assert ours.encode("<pad><eos>") == [ours.pad_token_id, ours.eos_token_id] == [256, 257]
    assert ours.decode([65, 257, 66], skip_special_tokens=True) == "AB"


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown role usr"):
        ByteTokenizer().apply_chat_template([{"role": "usr", "content": "x"}], tokenize=False)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(NovaError, match="ud800"):
        ByteTokenizer().encode("a\ud800b")


def test_saved_files_are_recognised(tmp_path: Path) -> None:
    ByteTokenizer().save_pretrained(tmp_path)
    assert ByteTokenizer.read(tmp_path) is not None
    (tmp_path / "chat_template.jinja").write_text("another", encoding="utf-8")
    again = ByteTokenizer.read(tmp_path)
    assert again is not None and again.chat_template == "another"
    assert ByteTokenizer.read(tmp_path / "missing") is None
