"""What must hold for every chat template and every tokenizer: a turn's last trained token stops the sampler, the tokens
say what the template wrote, and what rewards are shown renders to the tokens that were sampled."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from novarl.data.render import render_prompt, render_sft, turn_text
from novarl.data.template import stop_tokens
from tests.data.templates import LOSSLESS, LOSSY, TEMPLATES, tokenizer as make

KINDS = (*LOSSLESS, *LOSSY)
CHAT = [
    {"role": "user", "content": "what is the answer"},
    {"role": "assistant", "content": "the answer is four"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "hello, yes\n\nno"},
]
tokenizer = cache(make)


def said(tok: Any, tokens: Any) -> str:
    return str(tok.decode(tokens, skip_special_tokens=False))


def as_trained(tok: Any, template: str, whole: str) -> str:
    """A finished conversation up to where its last turn ends, with eos where the template writes no token there."""
    if (
        template == "phi" and len(tok.encode("<|end|>", add_special_tokens=False)) == 1
    ):  # it writes eos behind a conversation, whose last turn has ended before
        whole = whole.removesuffix(tok.eos_token)
    whole = whole.rstrip()
    return whole if tok.encode(whole)[-1] in stop_tokens(tok) else whole + tok.eos_token


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_trained_token_of_each_turn_stops_the_sampler(kind: str, template: str) -> None:
    tok = tokenizer(kind, template)
    turns = 0
    for tokens, mask in render_sft(tok, CHAT):
        for place, trained in enumerate(mask):
            if trained and (place + 1 == len(mask) or not mask[place + 1]):
                assert tokens[place] in stop_tokens(tok), said(tok, tokens[: place + 1])
                turns += 1
    assert turns == 2


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", LOSSLESS)
def test_the_tokens_say_what_the_template_wrote(kind: str, template: str) -> None:
    tok = tokenizer(kind, template)
    *_, (tokens, mask) = render_sft(tok, CHAT)
    header = tok.apply_chat_template(CHAT[:3], tokenize=False, add_generation_prompt=True)
    whole = tok.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=False)
    if template == "deepseek_r1":  # the thought that the header opens is closed
        whole = header + "\n</think>\n\n" + CHAT[3]["content"] + tok.eos_token
    text = as_trained(tok, template, whole)
    if kind == "metaspace_always":  # it writes a space behind every special token, and reads it back as one
        assert said(tok, tokens) == tok.decode(tok.encode(text, add_special_tokens=False))
    else:
        assert said(tok, tokens) == text
    begin = len(render_prompt(tok, CHAT[:3]))
    assert tokens[:begin] == render_prompt(tok, CHAT[:3])
    assert mask[begin] and not mask[begin - 1]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_rewards_see_renders_to_the_sampled_tokens(kind: str, template: str) -> None:
    tok = tokenizer(kind, template)
    prompt = render_prompt(tok, CHAT[:3])
    *_, (tokens, _) = render_sft(tok, CHAT)
    sampled = tokens[len(prompt) :]
    content = turn_text(tok, prompt, sampled, ended=True)
    *_, (again, _) = render_sft(tok, [*CHAT[:3], {"role": "assistant", "content": content}])
    assert again == tokens
    if kind in LOSSLESS and template != "deepseek_r1":
        assert content == CHAT[3]["content"]


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("text", ["Answer: yes", "The answer is yes", "a\n b", "Colour:  blue", " x  y "])
def test_every_split_of_a_text_survives(kind: str, text: str) -> None:
    tok = tokenizer(kind, "chatml")
    for cut in range(1, len(text)):
        row = [{"role": "user", "content": text[:cut]}, {"role": "assistant", "content": text[cut:]}]
        ((tokens, mask),) = render_sft(tok, row, apply_chat_template=False)
        prompt = render_prompt(tok, row[:1], apply_chat_template=False)
        first = int(tokens[0] == getattr(tok, "bos_token_id", None))
        lost = " " if kind in ("metaspace_bpe", "metaspace_always", "unigram") else ""  # the first space is theirs
        assert said(tok, tokens[first:]) == text.removeprefix(lost) + tok.eos_token, (cut, tokens)
        assert tokens[: len(prompt)] == prompt and mask.index(True) == len(prompt)
        assert turn_text(tok, prompt, tokens[len(prompt) :], ended=True, apply_chat_template=False) == text[cut:], cut


@pytest.mark.parametrize("kind", ["word_piece", "words"])
def test_a_word_across_the_border_stays_a_word(kind: str) -> None:
    tok = tokenizer(kind, "chatml")
    row = [{"role": "user", "content": "The ans"}, {"role": "assistant", "content": "wer is yes"}]
    ((tokens, _),) = render_sft(tok, row, apply_chat_template=False)
    assert said(tok, tokens[:-1]) == "The answer is yes"


@pytest.mark.parametrize("kind", ["metaspace_bpe", "unigram"])
def test_bos_and_eos_of_a_text_are_not_doubled(kind: str) -> None:
    tok = tokenizer(kind, "mistral")
    row = [{"role": "user", "content": "<s>hello there"}, {"role": "assistant", "content": " yes</s>"}]
    ((tokens, _),) = render_sft(tok, row, apply_chat_template=False)
    assert tokens.count(tok.bos_token_id) == tokens.count(tok.eos_token_id) == 1
    assert tokens[0] == tok.bos_token_id and tokens[-1] == tok.eos_token_id
    assert render_prompt(tok, row[:1], apply_chat_template=False).count(tok.bos_token_id) == 1
