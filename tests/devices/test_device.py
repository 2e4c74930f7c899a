"""What a run does on a device that is not the CPU, by the rules of a GPU: nothing may mix tensors of the two.

There is no GPU where these tests run, so the device is this CPU in disguise (`disguised.py`), and what comes out must
be what the CPU gives. No kernel of a GPU is tried here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REWARD = """
def digits(messages, answer):
    return float(sum(map(ord, messages[-1]["content"])) % 7)
"""
"""By which even an untrained model gets all sorts of scores."""
RL = "task=sort warmup=4 steps=2 prompts_per_rollout=4 responses_per_prompt=4 eval.n=4 save_every=1"
COMMANDS = {
    "grpo": f"rl {RL} reward={{digits}} algo=grpo kl.coef=0.1 kl.type=loss micro.max_tokens=512",
    "resumed": "rl {grpo}/config.yaml run_dir={grpo} resume=auto steps=3",
    "in 16 bits": f"rl {RL} reward={{digits}} dtype=bfloat16",
    "ppo": f"rl {RL} reward={{digits}} algo=ppo",
    "vineppo": f"rl {RL} reward={{digits}} algo=vineppo",
    "prime": f"rl {RL} reward={{digits}} algo=prime",
    "adapters": f"rl {RL} reward={{digits}} lora.rank=4 model={{grpo}}/checkpoints/latest/model",
    "adopted": f"rl {RL} reward={{digits}} model={{llama}}",
    "left": f"rl {RL} reward={{digits}} model={{olmo}}",
    "sft": "sft task=sort steps=2 eval.n=4",
    "dpo": "dpo data={pairs} eval.data={pairs} steps=2",
    "rm": "rm data={pairs} eval.data={pairs} steps=2",
    "judged": f"rl {RL} reward=model:{{rm}}/checkpoints/latest/model",
}
HOME = {"resumed": "grpo"}
"""Whose directory a command's run is in, where it is another's."""
COLUMNS = {
    "loss",
    "total_loss",
    "policy_loss",
    "reward_mean",
    "reward_std",
    "advantage_std",
    "grad_norm",
    "kl",
    "entropy",
}
PAIRS = [{"prompt": f"say {a}", "chosen": a, "rejected": b} for a, b in ("ab", "ba", "cd", "dc")]


def published(folder: Path) -> dict[str, Path]:
    """Models that are loaded through transformers: one that the built-in decoder takes, one that is left to them."""
    import torch
    import transformers

    from novarl.models.byte_tokenizer import ByteTokenizer

    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 257, "pad_token_id": None}
    models = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)),
        "olmo": transformers.OlmoForCausalLM(transformers.OlmoConfig(**shape)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        ByteTokenizer().save_pretrained(str(folder / name))
    return {name: folder / name for name in models}


def outcome(folder: Path) -> dict[str, Any]:
    """Every command on the device, and on the CPU: where the runs are, what they ended with."""
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    (folder / "mine.py").write_text(REWARD)
    given = {**published(folder), "pairs": pairs, "digits": f"{folder / 'mine.py'}:digits"}
    started = {}
    for device in ("disguised", "cpu"):
        runs = {name: folder / device / name.replace(" ", "_") for name in COMMANDS}
        words = [
            [*command.format(**given, **runs).split(), *([] if "run_dir=" in command else [f"run_dir={runs[name]}"])]
            for name, command in COMMANDS.items()
        ]
        path = folder / f"{device}.json"
        path.write_text(json.dumps(words))
        script = [sys.executable, str(Path(__file__).with_name("disguised.py")), str(path), device]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NOVARL_NO_COLOR": "1"}
        with (folder / f"{device}.txt").open("w") as log:
            process = subprocess.Popen(script, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder)
        started[device] = (process, path, runs, folder / f"{device}.txt")
    found = {}
    for device, (process, path, runs, log) in started.items():
        process.wait(540)
        assert path.with_suffix(".found").exists(), log.read_text()[-4000:]
        found[device] = json.loads(path.with_suffix(".found").read_text()) | {"runs": runs, "log": log.read_text()}
    return found


def test_runs_end_as_on_the_cpu(tmp_path: Path) -> None:
    """One test, so that the runs are made once."""
    found = outcome(tmp_path)
    refused = ["sum", "into", "index", "gather", "put", "cat", "numpy", "select"]
    assert found["disguised"]["mixes"] == refused, "a disguise that hides nothing"
    assert found["cpu"]["mixes"] == []
    for number, name in enumerate(COMMANDS):
        for device in found.values():
            assert device["codes"][number] == 0, (name, device["log"][-4000:])
        there, here = (metrics(found[device]["runs"][HOME.get(name, name)], device) for device in ("disguised", "cpu"))
        assert len(there) == len(here) >= 2, name
        phase = here[-1]["phase"]
        assert any(line["grad_norm"] > 0 for line in here if line["phase"] == phase), f"{name} learns nothing"
        assert phase != "rl" or any(line.get("advantage_std", 0.0) > 0 for line in here), f"rewards of {name} are equal"
        near = 0.05 if name == "in 16 bits" else 2e-3
        for mine, theirs in zip(there, here, strict=True):
            compared = COLUMNS & theirs.keys()
            if name == "in 16 bits" and theirs["phase"] == "rl":  # a token that turns out otherwise changes the rewards
                assert 0 < mine["grad_norm"] < 100 and mine["mismatch_mean"] < near, (name, mine)
                compared = {"kl", "entropy"}
            assert len(compared) >= 2, name
            for column in compared:
                assert mine[column] == pytest.approx(theirs[column], rel=near, abs=near), (name, column)


def metrics(run: Path, device: str) -> list[dict[str, Any]]:
    """The rows that a run on this device has written."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert {event["device"].split(":")[0] for event in events if "device" in event} == {device}
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
