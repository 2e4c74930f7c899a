# ruff: noqa: E501
"""Chat templates of the shapes that public models have, and tokenizers of the kinds that they come with, trained here."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_HEADER = "{% if add_generation_prompt %}"
_THOUGHTLESS = (  # a thought is shown in the last turn only
    "{% set c = m['content'] %}{% if not loop.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    + _HEADER + "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    + _HEADER + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) "
    "+ '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    + _HEADER + "{{ '<start_of_turn>model\n' }}{% endif %}",
    "phi": "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    + _HEADER + "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "zephyr": "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    + _HEADER + "{{ '<|assistant|>\n' }}{% endif %}",
    "qwen3": "{% for m in messages %}" + _THOUGHTLESS + "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}"
    "{% endfor %}" + _HEADER + "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "deepseek_r1": "{{ bos_token }}{% for m in messages %}{% set c = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{{ '<|' + m['role'] + '|>' + c + (eos_token if m['role'] == 'assistant' else '') }}{% endfor %}"
    + _HEADER + "{{ '<|assistant|><think>\n' }}{% endif %}",
    "llama2": "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "alpaca": "{% for m in messages %}{{ '### ' + ('Response' if m['role'] == 'assistant' else 'Instruction') + ':\n' "
    "+ m['content'] + '\n\n' }}{% endfor %}" + _HEADER + "{{ '### Response:\n' }}{% endif %}",
    "dated": "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.<|im_end|>\n"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    + _HEADER + "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "text_end": "{% for m in messages %}{{ '### ' + m['role'] + '\n' + m['content'] + '\n### End\n' }}{% endfor %}"
    + _HEADER + "{{ '### assistant\n' }}{% endif %}",
    "glm": "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    + _HEADER + "{{ '<|assistant|>\n' }}{% endif %}",
    "vicuna": "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    + _HEADER + "{{ 'ASSISTANT: ' }}{% endif %}",
    "tools": "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for call in m.get('tool_calls') or [] %}"
    "{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    + _HEADER + "{{ '<|im_start|>assistant\n' }}{% endif %}",
}  # fmt: skip
SPECIALS = (
    *("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>", "<think>", "</think>"),
)
CORPUS = [
    "user assistant model system Today is: the answer is four, The answer. USER: ASSISTANT: yes no hello there\n",
    "### Response: ### Instruction: ### End [INST] [/INST] what is the answer {}[]\"'_-05 Mar 2026 lookup name\n",
    " ".join("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;?!#[]/<>|{}\"'_-+="),
] * 20
LOSSLESS = ("byte_bpe", "metaspace_bpe", "metaspace_always", "unigram", "chars", "bytes")
LOSSY = ("word_piece", "words")
"""These lose line breaks and runs of spaces whatever they are given."""


def tokenizer(kind: str, template: str) -> Any:
    """A tokenizer of this kind with one of the templates."""
    from transformers import PreTrainedTokenizerFast

    if kind == "bytes":
        from novarl.models.byte_tokenizer import ByteTokenizer

        return ByteTokenizer(TEMPLATES[template].replace("bos_token", "''"))
    return PreTrainedTokenizerFast(
        tokenizer_object=_core(kind),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIALS[3:]),
        chat_template=TEMPLATES[template],
        clean_up_tokenization_spaces=False,
    )


def _core(kind: str) -> Tokenizer:
    special = {"special_tokens": list(SPECIALS), "show_progress": False}
    trainer: Any
    if kind == "byte_bpe":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **special)
    elif kind in ("metaspace_bpe", "metaspace_always", "unigram"):
        scheme = "always" if kind == "metaspace_always" else "first"
        core = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        core.decoder = decoders.Metaspace(prepend_scheme=scheme)
        if kind == "unigram":
            trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", **special)
        else:
            trainer = trainers.BpeTrainer(vocab_size=300, **special)
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    elif kind == "word_piece":
        core = Tokenizer(models.WordPiece(unk_token="<unk>"))
        core.normalizer = normalizers.NFC()
        core.pre_tokenizer, core.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
        trainer = trainers.WordPieceTrainer(vocab_size=400, **special)
    elif kind == "words":
        core = Tokenizer(models.WordLevel(unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(vocab_size=400, **special)
    else:
        core = Tokenizer(models.BPE(unk_token="<unk>"))
        core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
        trainer = trainers.BpeTrainer(vocab_size=1, **special)
    core.train_from_iterator(CORPUS, trainer)
    return core
