from __future__ import annotations

from typing import Any

import pytest

from novarl.core.errors import NovaError
from novarl.data.formats import Refused
from novarl.data.render import render_prompt, render_sft
from novarl.models.byte_tokenizer import ByteTokenizer


def chat(*contents: str, system: str = "") -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def test_a_prompt_ends_with_the_assistants_header(tokenizer: Any) -> None:
    tokens = render_prompt(tokenizer, chat("hi"))
    assert tokenizer.decode(tokens) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_contents_are_joined_without_a_template(tokenizer: Any) -> None:
    messages = chat("2+2=", "4. ", "3+3=", system="Sums: ")
    text = tokenizer.decode(render_prompt(tokenizer, messages, apply_chat_template=False))
    assert text == "Sums: 2+2=4. <eos>3+3="  # as SFT ends an answer, and as the policy ended it


@pytest.mark.parametrize("kind", ["fake", "byte"])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_every_assistant_turn_and_its_end_are_trained_on(tokenizer: Any, trained: Any, kind: str, system: str) -> None:
    tok, end = (tokenizer, "<|im_end|>") if kind == "fake" else (ByteTokenizer(), "<eos>")
    messages = chat("q1 é", "a1\n", "q2", "  a2 好", "q3", "a3", system=system)
    ((tokens, mask),) = render_sft(tok, messages)
    assert trained(tok, tokens, mask) == [f"a1\n{end}", f"  a2 好{end}", f"a3{end}"]
    whole = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    assert whole.startswith(tok.decode(tokens)) and whole[len(tok.decode(tokens)) :].strip() == ""
    # what precedes the first trained token is the prompt that RL would sample from
    assert tokens[: mask.index(True)] == render_prompt(tok, messages[: 2 if system else 1])


def test_turns_of_the_context_are_not_trained_on(tokenizer: Any, trained: Any) -> None:
    messages = chat("q1", "a1", "q2", "a2")
    ((tokens, mask),) = render_sft(tokenizer, messages, context=3)
    assert trained(tokenizer, tokens, mask) == ["a2<|im_end|>"]
    ((tokens, mask),) = render_sft(tokenizer, messages, context=3, apply_chat_template=False)
    assert trained(tokenizer, tokens, mask) == ["a2<eos>"]
    assert tokenizer.decode(tokens) == "q1a1<eos>q2a2<eos>"


@pytest.mark.parametrize("kind", ["fake", "byte"])
def test_without_a_template_each_trained_turn_ends_with_eos(tokenizer: Any, trained: Any, kind: str) -> None:
    tok = tokenizer if kind == "fake" else ByteTokenizer()
    ((tokens, mask),) = render_sft(tok, chat("q1 ", "a1 ", "q2 ", "a2"), apply_chat_template=False)
    assert tok.decode(tokens) == "q1 a1 <eos>q2 a2<eos>"
    assert trained(tok, tokens, mask) == ["a1 <eos>", "a2<eos>"]


def test_a_trailing_user_turn_is_left_out(tokenizer: Any, trained: Any) -> None:
    ((tokens, mask),) = render_sft(tokenizer, chat("q1", "a1", "q2"))
    assert trained(tokenizer, tokens, mask) == ["a1<|im_end|>"]
    assert "q2" not in tokenizer.decode(tokens)


def test_masks_do_not_depend_on_token_ids(tokenizer: Any, trained: Any) -> None:
    """The prompt may hold the very tokens of the answer, of its end, and of padding (pad is eos here)."""
    messages = chat("a1<|im_end|>", "a1", "a1<eos>", "a1")
    ((tokens, mask),) = render_sft(tokenizer, messages)
    assert trained(tokenizer, tokens, mask) == ["a1<|im_end|>", "a1<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_gives_a_sequence_for_each(with_template: Any, trained: Any) -> None:
    tok = with_template("forgetful")
    messages = chat("q1", "<think>t1</think>a1", "q2", "a2", "q3", "<think>t3</think>a3")
    first, second = render_sft(tok, messages)
    assert trained(tok, *first) == ["<think>t1</think>a1<|im_end|>"]
    # a2 had no thoughts, so a3 continues its sequence; both follow the rewritten a1, as they do in use
    assert trained(tok, *second) == ["a2<|im_end|>", "<think>t3</think>a3<|im_end|>"]
    assert "t1" not in tok.decode(second[0])
    assert second[0][: second[1].index(True)] == render_prompt(tok, messages[:3])
    assert len(render_sft(tok, chat("q1", "a1", "q2", "a2"))) == 1


def test_a_template_that_contradicts_itself_is_refused(with_template: Any) -> None:
    with pytest.raises(Refused, match=r"is inconsistent.*shout.*apply_chat_template=false"):
        render_sft(with_template("shouting"), chat("q", "a"))


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        ({"content": "a"}, "\n</think>\n\na"),
        ({"content": "<think>\nt\n</think>\n\na"}, "t\n</think>\n\na"),
        ({"content": "t\n</think>\n\na"}, "t\n</think>\n\na"),
        ({"content": "a", "reasoning_content": "t"}, "t\n</think>\n\na"),
    ],
)
def test_a_thought_that_the_prompt_opens_is_learnt_and_closed(
    with_template: Any, trained: Any, message: dict[str, str], turn: str
) -> None:
    """The finished conversation of such a template shows no thought, so the prompt is no beginning of it."""
    tok = with_template("presumptuous")
    messages = [*chat("q1"), {"role": "assistant", **message}, *chat("q2", "b")]
    first, second = render_sft(tok, messages)
    assert trained(tok, *first) == [f"{turn}<|im_end|>"]
    assert trained(tok, *second) == ["\n</think>\n\nb<|im_end|>"]
    for (tokens, mask), asked in ((first, messages[:1]), (second, messages[:3])):
        assert tokens[: mask.index(True)] == render_prompt(tok, asked)
        assert tok.decode(tokens[: mask.index(True)]).endswith("assistant\n<think>\n")


def test_a_template_without_an_end_token_gets_eos_after_every_turn(with_template: Any, trained: Any) -> None:
    tok = with_template("endless")
    messages = chat("q1", "a1", "q2", "a2")
    first, second = render_sft(tok, messages)
    assert trained(tok, *first) == ["a1<eos>"]
    assert trained(tok, *second) == ["a2<eos>"]
    # The history holds no eos, neither here nor in the prompt of RL.
    assert tok.decode(second[0]) == "user: q1\nassistant: a1\nuser: q2\nassistant: a2<eos>"
    assert second[0][: second[1].index(True)] == render_prompt(tok, messages[:3])


@pytest.mark.parametrize("content", [" yes", "\nyes", "yes ", "yes"])
def test_a_trimmed_turn_teaches_its_end(with_template: Any, trained: Any, content: str) -> None:
    tok = with_template("trimming")
    ((tokens, mask),) = render_sft(tok, chat("q", content))
    assert trained(tok, tokens, mask) == ["yes<eos>"]


def test_a_turn_that_ends_in_text_gets_eos_behind_it(with_template: Any, trained: Any) -> None:
    tok = with_template("text_end")
    assert [trained(tok, *one) for one in render_sft(tok, chat("q1", "a1", "q2", "a2"))] == [
        ["a1\n### End<eos>"],
        ["a2\n### End<eos>"],
    ]


def test_a_turn_that_is_only_a_tool_call_teaches_its_end(with_template: Any, trained: Any) -> None:
    tok = with_template("calling")
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"hill": "A"}}}
    messages = [*chat("q"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    ((tokens, mask),) = render_sft(tok, messages)
    assert trained(tok, tokens, mask) == ['call look_up {"hill": "A"}<eos>']
    with pytest.raises(Refused, match="does not render the tool call 'look_up'"):
        render_sft(with_template("chatml"), messages)
    with pytest.raises(Refused, match="which require a chat template"):
        render_sft(tok, messages, apply_chat_template=False)


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"weight": 0.0, "train": None}])
@pytest.mark.parametrize("templated", [True, False])
def test_a_turn_of_weight_0_is_context(tokenizer: Any, trained: Any, mark: dict[str, Any], templated: bool) -> None:
    messages: list[dict[str, Any]] = chat("Say one. ", "WRONG", "Again. ", "one")
    messages[1] |= mark
    ((tokens, mask),) = render_sft(tokenizer, messages, apply_chat_template=templated)
    assert trained(tokenizer, tokens, mask) == ["one<|im_end|>" if templated else "one<eos>"]
    assert tokens[: mask.index(True)] == render_prompt(tokenizer, messages[:3], apply_chat_template=templated)
    assert "WRONG" in tokenizer.decode(tokens)


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("templated", [True, False])
def test_what_precedes_a_turn_is_the_prompt_of_rl(tokenizer: Any, count: int, templated: bool) -> None:
    messages = chat("q1 ", "a1 ", "q2 ", "a2 ", "q3 ", "a3")
    ((tokens, mask),) = render_sft(tokenizer, messages[: count + 1], context=count, apply_chat_template=templated)
    assert tokens[: mask.index(True)] == render_prompt(tokenizer, messages[:count], apply_chat_template=templated)
    ((every, _),) = render_sft(tokenizer, messages[: count + 1], apply_chat_template=templated)
    assert every == tokens


def test_tool_calls_end_once(tokenizer: Any, trained: Any) -> None:
    messages = [*chat("q"), {"role": "assistant", "content": "", "tool_calls": [{}]}]
    ((tokens, mask),) = render_sft(tokenizer, messages)
    assert trained(tokenizer, tokens, mask) == ["<|im_end|>"]


def test_a_row_that_the_template_refuses_is_refused(with_template: Any) -> None:
    with pytest.raises(Refused, match="roles must alternate"):
        render_prompt(with_template("alternating"), chat("q", system="s"))


def test_no_template_is_said(with_template: Any) -> None:
    for render in (render_prompt, render_sft):
        with pytest.raises(NovaError, match=r"no chat template .set apply_chat_template=false."):
            render(with_template(None), chat("q", "a"))


def test_a_prompt_without_tokens_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "encode", lambda text, add_special_tokens: [])
    with pytest.raises(Refused, match="is empty"):
        render_prompt(tokenizer, chat("q"))
