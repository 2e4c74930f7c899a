"""vLLM's side of `make bench WORKLOAD=W7`. It runs in `.venv-vllm`: python run_vllm.py requests.json found.jsonl"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

# Before the import: one process, no compiler, no reports home.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    import vllm
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        asked["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=64,
        kv_cache_memory_bytes=512 << 20,
        seed=asked["seed"],
        distributed_executor_backend="uni",
    )
    sampling = SamplingParams(temperature=1.0, max_tokens=asked["longest"])
    tokenizer = llm.get_tokenizer()
    messages = [[{"role": "user", "content": text}] for text in asked["prompts"]]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    prompts = [{"prompt_token_ids": row} for row in ids["input_ids"]]
    llm.generate(prompts[:8], sampling, use_tqdm=False)
    began = time.perf_counter()
    found = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    lengths = [len(output.outputs[0].token_ids) for output in found]
    line = {"seconds": seconds, "lengths": lengths, "version": {"vllm": vllm.__version__}}
    Path(sys.argv[2]).write_text(json.dumps(line) + "\n")
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
