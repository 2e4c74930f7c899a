"""A tiny Llama with random weights and another folder's tokenizer: python make_llama.py TOKENIZER FOLDER"""

from __future__ import annotations

import sys

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(sys.argv[2])
    tokenizer.save_pretrained(sys.argv[2])


if __name__ == "__main__":
    main()
