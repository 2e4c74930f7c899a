"""LoRA on every learner: the base stays, `model/` is plain, and a resumed run ends with the same bits."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from novarl.config.load import load as load_config
from novarl.config.tree import RLConfig
from novarl.core.errors import NovaError
from novarl.models.load import load
from tests.compose.harness import QUIET, deterministic_metrics, finished, metrics, novarl, summary, weights, write_rows
from tests.compose.test_dpo import preferences

LORA = ("lora.rank=8", "seed=1", *QUIET)
ROLLOUTS = ("prompts_per_rollout=2", "responses_per_prompt=4", "rollout.max_tokens=6", "eval.n=2", "optim.lr=1e-2")
RL = ("rl", "task=sort", "warmup=4", "reward=reward.py:vowels", "kl.type=loss", "kl.coef=0.01", *ROLLOUTS, *LORA)
PAIRS = ("data=pairs.jsonl", "batch_size=4", "eval.n=4", "optim.lr=1e-3", *LORA)
RUNS: dict[str, tuple[str, ...]] = {
    "rl": RL,
    "ppo": (*RL, "algo=ppo", "kl.type=loss", "updates_per_rollout=1"),
    "ppo-shared": (*RL, "algo=ppo", "critic.shared=true", "updates_per_rollout=1"),
    "prime": (*RL, "algo=prime", "prime.threshold=0.2", "prime.lr=1e-2"),
    "sft": ("sft", "task=sort", "batch_size=2", "eval.n=2", "optim.lr=1e-2", *LORA),
    "dpo": ("dpo", *PAIRS),
    "rm-bt": ("rm", "loss=bt", *PAIRS),
    "rm-implicit": ("rm", "loss=implicit_dpo", *PAIRS),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with pairs and a reward that differs between answers even of a model that knows nothing."""
    write_rows(tmp_path / "pairs.jsonl", preferences())
    (tmp_path / "reward.py").write_text(
        "def vowels(messages, answer):\n"
        "    text = messages[-1]['content']\n"
        "    return sum(letter in 'abcde' for letter in text) / max(1, len(text))\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def state(run: Path) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / "latest" / "tensors.safetensors")


def adapters(run: Path) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in state(run).items() if name.startswith("/adapter/weights/")}
    assert found
    return found


def base(run: Path) -> dict[str, Tensor]:
    return load_file(run / "base" / "model.safetensors")


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_a_resumed_run_ends_with_the_same_bits(words: tuple[str, ...], folder: Path) -> None:
    finished(*words, "run_dir=whole", "steps=3")
    finished(*words, "run_dir=run", "steps=2", "save_every=1")
    halfway = adapters(folder / "run")
    finished(*words, "run_dir=run", "steps=3", "resume=auto")
    whole, run = folder / "whole", folder / "run"
    assert not equal(halfway, adapters(run)), "nothing was learnt after resuming"
    assert equal(state(whole), state(run)) and equal(weights(whole), weights(run)) and equal(base(whole), base(run))
    hidden = ("time/", "memory_", "tokens_per_second")

    def curve(run: Path) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in row.items() if not name.startswith(hidden)}
            for row in deterministic_metrics(run)
        ]

    assert curve(whole) == curve(run)


@pytest.mark.parametrize("name", ["rl", "sft", "rm-bt"])
def test_model_is_the_base_and_what_the_adapters_add(name: str, folder: Path) -> None:
    finished(*RUNS[name], "run_dir=run", "steps=2")
    run = folder / "run"
    below, above, learnt = base(run), weights(run), adapters(run)
    assert below.keys() == above.keys()
    start = "/adapter/weights/"
    found = {name.removeprefix(start).replace(".default.weight", ""): tensor for name, tensor in learnt.items()}
    layers = {name.removesuffix(".lora_A") for name in found if name.endswith(".lora_A")}
    assert {f"{layer}.weight" for layer in layers} < below.keys()
    moved = 0
    for key in below:
        layer = key.removesuffix(".weight")
        if layer not in layers:
            assert torch.equal(below[key], above[key]), key
            continue
        delta = 16 / 8 * found[f"{layer}.lora_B"] @ found[f"{layer}.lora_A"]
        assert torch.allclose(above[key], below[key] + delta, atol=1e-6, rtol=0), key
        moved += int(not torch.equal(above[key], below[key]))
    assert moved > 0.9 * len(layers)
    assert load(str(run / "checkpoints" / "latest" / "model")).context > 0
    moments = {name.split("/")[4] for name in state(run) if name.startswith("/learner/optimizer/moments/")}
    trained = {name.removeprefix(start) for name in learnt}
    assert {name for name in moments if "head." not in name} in (trained, {f"model.{name}" for name in trained})


def test_the_base_is_what_the_warm_up_left(folder: Path) -> None:
    """The warm-up is full fine-tuning: what it learns is below the adapters, which start at nothing."""
    finished(*RUNS["rl"], "run_dir=run", "steps=1", "save_every=4", "keep=5")
    warmed = load_file(folder / "run/checkpoints/warmup-000004/model/model.safetensors")
    fresh = dict(load("tiny", seed=1).model.named_parameters())
    assert equal(base(folder / "run"), warmed)
    assert all(not torch.equal(warmed[name], fresh[name].detach()) for name in warmed)


def test_a_run_stopped_in_its_warm_up_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(*RUNS["rl"], "run_dir=run", "steps=2", "save_every=2", "keep=9")
    kept = folder / "run" / "checkpoints"
    ended = state(folder / "run")
    for later in kept.iterdir():
        if later.name != "warmup-000002":
            later.unlink() if later.is_symlink() else shutil.rmtree(later)
    shutil.rmtree(folder / "run" / "base")
    finished(*RUNS["rl"], "run_dir=run", "steps=2", "resume=auto")
    assert equal(state(folder / "run"), ended)


def test_kl_to_the_base_is_zero_before_the_first_update_and_only_then(folder: Path) -> None:
    finished(*RUNS["rl"], "run_dir=run", "steps=3")
    distances = [record["kl_mean"] for record in metrics(folder / "run") if "kl_mean" in record]
    assert len(distances) == 3 and distances[0] == 0.0 and all(distance > 1e-6 for distance in distances[1:])
    assert not (folder / "run" / "reference").exists(), "the base needs no copy"


def test_the_base_without_adapters_is_a_copy_of_it_as_a_reference(folder: Path) -> None:
    """The same run against a second model, read from the first one's base: the same numbers, to the bit."""
    finished(*RUNS["rl"], "run_dir=run", "steps=3")
    finished(*RUNS["rl"], "run_dir=copy", "steps=3", "kl.reference=run/base")
    one, two = adapters(folder / "run"), adapters(folder / "copy")
    assert equal(one, two)


def test_reinforcement_learning_through_adapters_raises_the_held_out_score(folder: Path) -> None:
    words = [word for word in RL if not word.startswith(("kl.", "warmup", "eval.n", "responses", "prompts"))]
    more = ("warmup=12", "steps=12", "prompts_per_rollout=4", "responses_per_prompt=8", "eval.n=16", "lora.alpha=32")
    finished(*words, *more, "run_dir=run")
    found = summary(folder / "run")
    rewards = [record["reward_mean"] for record in metrics(folder / "run") if "reward_mean" in record]
    assert math.fsum(rewards[-3:]) / 3 > math.fsum(rewards[:3]) / 3 + 0.2, rewards
    assert found["after"]["score"] > found["before"]["score"] + 0.1, found


def test_a_run_is_not_gone_on_with_under_other_adapters(folder: Path) -> None:
    words = [word for word in RUNS["sft"] if word != "lora.rank=8"]
    finished(*words, "lora.rank=8", "run_dir=run", "steps=1")
    finished(*words, "run_dir=plain", "steps=1")
    for run, given, said in (
        ("run", "lora.rank=4", "was started with lora.rank=8, but now it is 4"),
        ("run", "lora.rank=0", "was started with lora.rank=8, but now it is 0"),
        ("plain", "lora.rank=8", "was started with lora.rank=0, but now it is 8"),
    ):
        ended = novarl(*words, given, f"run_dir={run}", "steps=2", "resume=auto")
        assert ended.code == 2 and said in ended.err and ended.err.count("\n") == 1, ended.err
    ended = novarl(*words, "lora.rank=8", "lora.alpha=32", "run_dir=run", "steps=2", "resume=auto")
    assert ended.code == 2 and "lora.alpha=16.0" in ended.err
    shutil.rmtree(folder / "run" / "base")
    ended = novarl(*words, "lora.rank=8", "run_dir=run", "steps=2", "resume=auto")
    assert ended.code == 2 and "the base weights of the run's adapters are missing" in ended.err


def test_what_cannot_work_is_refused_before_anything_is_written(folder: Path) -> None:
    for words, said in (
        ((*RUNS["rl"], "lora.target=[c_attn]"), "no linear layer is named c_attn"),
        ((*RUNS["sft"], "lora.target=[c_attn]"), "no linear layer is named c_attn"),
        ((*RUNS["rl"], "kl.reference=ema"), "a moving average of adapters"),
        ((*RUNS["rl"], "lora.dropout=0.1"), "dropout would make training and sampling probabilities differ"),
    ):
        ended = novarl(*words, "run_dir=refused", "steps=1")
        assert ended.code == 2 and said in ended.err and not (folder / "refused").exists(), ended.err


def test_the_names_of_others() -> None:
    config = load_config(RLConfig, overrides=["task=sort", "actor.lora.rank=4", "actor.lora.target_modules=[q_proj]"])
    assert (config.lora.rank, config.lora.alpha, config.lora.target) == (4, 16.0, ("q_proj",))
    assert load_config(RLConfig, overrides=["task=sort"]).lora.target == "all-linear"
    with pytest.raises(NovaError, match="rank"):
        load_config(RLConfig, overrides=["task=sort", "lora.rank=-1"])
