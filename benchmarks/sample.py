"""Our side of `make bench WORKLOAD=W7`: python -m benchmarks.sample requests.json found.jsonl"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import novarl
from novarl.core.types import Sampling
from novarl.data.render import render_prompt
from novarl.engines.local.engine import LocalEngine, sample_all
from novarl.models.load import load
from novarl.run.machine import start
from novarl.run.sampler import local_engine


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    device, _ = start(asked["device"], None, asked["seed"])
    policy = load(asked["model"], device=device)
    engine = local_engine(policy)
    assert isinstance(engine, LocalEngine)
    sampling = Sampling(temperature=1.0, max_tokens=asked["longest"], seed=asked["seed"])
    prompts = [
        render_prompt(policy.tokenizer, [{"role": "user", "content": text}], apply_chat_template=True)
        for text in asked["prompts"]
    ]
    requests = [(prompt, sampling, str(index)) for index, prompt in enumerate(prompts)]
    sample_all(engine, requests[:8])
    began = time.perf_counter()
    completions = sample_all(engine, requests)
    seconds = time.perf_counter() - began
    line = {"seconds": seconds, "lengths": [len(c.tokens) for c in completions], "version": novarl.__version__}
    Path(sys.argv[2]).write_text(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
