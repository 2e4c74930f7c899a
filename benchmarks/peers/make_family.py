"""A folder's model again, as others publish it, in several files: python make_family.py FOLDER OUT [biases]

With biases, all of them 0, it computes the same, and belongs to those whose modules are left to transformers.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    source, out = sys.argv[1:3]
    config = AutoConfig.from_pretrained(source)
    config.attention_bias = "biases" in sys.argv
    model = AutoModelForCausalLM.from_pretrained(source, config=config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    model.save_pretrained(out, max_shard_size="5MB")
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


if __name__ == "__main__":
    main()
