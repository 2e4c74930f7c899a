"""Rendering with real fast tokenizers, trained here: byte-level BPE (GPT-2's, Qwen's kind) and SentencePiece's kind."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from novarl.data.render import render_prompt, render_sft

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (  # no special token at any border
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
INST = (  # Mistral's kind: one text, spaces between, eos after the answer
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
CORPUS = ["user: the answer is four\nassistant: the answer is five. [INST] hello there [/INST] hello"] * 50
CHAT = [
    {"role": "user", "content": "what is the answer"},
    {"role": "assistant", "content": "the answer is four"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "hello, 好 five"},
]


def wrap(core: Tokenizer, template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        bos_token="<bos>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def trainer(**options: Any) -> trainers.BpeTrainer:
    specials = ["<eos>", "<bos>", "<|im_start|>", "<|im_end|>"]
    return trainers.BpeTrainer(vocab_size=600, special_tokens=specials, show_progress=False, **options)


def byte_level(template: str) -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(CORPUS, trainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return wrap(core, template)


def sentence_piece(template: str) -> Any:
    core = Tokenizer(models.BPE(unk_token="<eos>", byte_fallback=False))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    core.train_from_iterator([*CORPUS, "hello, 好 five , . ? [ ] /"], trainer())
    core.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    return wrap(core, template)


@pytest.mark.parametrize("messages", [CHAT, [{"role": "system", "content": "the five"}, *CHAT]])
def test_masks_with_byte_level_bpe(trained: Any, messages: list[Any]) -> None:
    tok = byte_level(CHATML)
    ((tokens, mask),) = render_sft(tok, messages)
    assert trained(tok, tokens, mask) == ["the answer is four<|im_end|>", "hello, 好 five<|im_end|>"]
    assert list(tokens) == tok.apply_chat_template(messages, tokenize=True)["input_ids"][: len(tokens)]
    assert tokens[: mask.index(True)] == render_prompt(tok, messages[:-3])


def test_tokens_that_would_cross_a_border_do_not(trained: Any) -> None:
    """`assistant: the` merges " the"; the policy was asked with "assistant: " and answered "the"."""
    tok = byte_level(PLAIN)
    first, (tokens, mask) = render_sft(tok, CHAT)
    text = tok.apply_chat_template(CHAT, tokenize=False)
    assert list(first[0][:-1]) != tok.encode(tok.decode(first[0][:-1]))  # it does merge
    assert trained(tok, *first) == ["the answer is four<eos>"]
    assert trained(tok, tokens, mask) == ["hello, 好 five<eos>"]
    assert first[0][: first[1].index(True)] == render_prompt(tok, CHAT[:1])
    assert tokens[: mask.index(True)] == render_prompt(tok, CHAT[:3])
    assert tok.decode(tokens) == text.rstrip() + "<eos>"


def test_what_a_tokenizer_does_at_the_start_of_a_text_stays_there(trained: Any) -> None:
    tok = sentence_piece(INST)
    ((tokens, mask),) = render_sft(tok, CHAT)
    text = tok.apply_chat_template(CHAT, tokenize=False)
    assert list(tokens) == tok.encode(text, add_special_tokens=False)
    assert tok.decode(tokens) == text
    assert sum(token == tok.eos_token_id and chosen for token, chosen in zip(tokens, mask, strict=True)) == 2
    assert tokens[: mask.index(True)] == render_prompt(tok, CHAT[:1])


def test_bos_is_kept_without_a_template() -> None:
    tok = sentence_piece(INST)
    prompt = render_prompt(tok, CHAT[:1], apply_chat_template=False)
    assert list(prompt) == tok.encode("what is the answer")
    assert prompt[0] == tok.bos_token_id
    ((tokens, mask),) = render_sft(tok, CHAT[:2], apply_chat_template=False)
    assert tokens[: mask.index(True)] == prompt
    assert render_prompt(byte_level(CHATML), CHAT[:1], apply_chat_template=False)[0] != 1
