"""A tokenizer of letters, and a tiny model that is saved to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    letters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<end>", "<unknown>", *letters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>", padding_side="left"
    )
    made.chat_template = TEMPLATE
    return made


def save(folder: Path, *, reward: bool = False) -> str:
    """The folder of a tiny model with random weights; with one output for each answer if it is a reward model."""
    torch.manual_seed(0)
    made = tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(made),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": made.pad_token_id,
        "eos_token_id": made.eos_token_id,
        **({"num_labels": 1} if reward else {}),
    }
    config = Qwen2Config(**settings)
    model = Qwen2ForSequenceClassification(config) if reward else Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return str(folder)


SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "save_steps": 2,
    "learning_rate": 1e-3,
    "disable_tqdm": True,
}
