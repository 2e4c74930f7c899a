"""transformers' side of `make bench WORKLOAD=W7`: `generate`, or continuous batching. It runs in `.venv-peers`.

python run_generate.py requests.json found.jsonl
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(asked["seed"])
    tokenizer = AutoTokenizer.from_pretrained(asked["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32, attn_implementation="sdpa")
    model = model.to(asked["device"]).eval()
    messages = [[{"role": "user", "content": text}] for text in asked["prompts"]]
    prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    run = {"generate": generate, "continuous": continuous}[asked["kind"]]
    ids = prompts["input_ids"]
    run(model, tokenizer, ids[:8], asked)
    began = time.perf_counter()
    lengths = run(model, tokenizer, ids, asked)
    seconds = time.perf_counter() - began
    version = {"transformers": transformers.__version__, "torch": torch.__version__}
    Path(sys.argv[2]).write_text(json.dumps({"seconds": seconds, "lengths": lengths, "version": version}) + "\n")


def settings(tokenizer: Any, asked: dict[str, Any]) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=asked["longest"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


@torch.no_grad()
def generate(model: Any, tokenizer: Any, prompts: list[list[int]], asked: dict[str, Any]) -> list[int]:
    """In batches, those of like prompts together: the least padding."""
    lengths: list[int] = []
    prompts = sorted(prompts, key=len)
    for first in range(0, len(prompts), asked["batch"]):
        together = tokenizer.pad({"input_ids": prompts[first : first + asked["batch"]]}, return_tensors="pt")
        together = together.to(model.device)
        ids = model.generate(**together, generation_config=settings(tokenizer, asked))
        for row in ids[:, together["input_ids"].shape[1] :].tolist():
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            lengths.append(end)
    return lengths


def continuous(model: Any, tokenizer: Any, prompts: list[list[int]], asked: dict[str, Any]) -> list[int]:
    from transformers import ContinuousBatchingConfig

    found = model.generate_batch(
        prompts,
        generation_config=settings(tokenizer, asked),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32, num_blocks=1024, use_cuda_graph=False, auto_switch_to_flash=False
        ),
        progress_bar=False,
    )
    return [len(output.generated_tokens) for output in found.values()]


if __name__ == "__main__":
    main()
