"""Policies by name, and back: what we save Hugging Face loads, and what cannot be loaded is said in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from novarl.core.errors import NovaError
from novarl.models.load import Policy, load, save
from novarl.models.transformer import Decoder


def greedy(model: nn.Module, tokens: list[int], length: int) -> list[int]:
    with torch.no_grad():
        for _ in range(length):
            hidden = model(torch.tensor([tokens]), position_ids=torch.arange(len(tokens))[None]).last_hidden_state
            tokens = [*tokens, int(model.lm_head(hidden[0, -1]).argmax())]
    return tokens


def test_what_we_save_hugging_face_generates_from(trained: Policy, tmp_path: Path) -> None:
    save(trained, tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    prompt = "<|user|>sort: dcab<eos><|assistant|>"
    ids = tokenizer(prompt, return_tensors="pt")
    generated = model.generate(**ids, max_new_tokens=40, do_sample=False)[0].tolist()
    ours = greedy(trained.model, trained.tokenizer.encode(prompt), 40)
    end = ours.index(trained.eos_ids[0], len(ids["input_ids"][0])) + 1
    assert generated == ours[:end]
    assert tokenizer.decode(generated) == prompt + "abcd<eos>", "the model was trained to say this"


def test_what_we_save_loads_back_bit_for_bit(trained: Policy, tmp_path: Path) -> None:
    save(trained, tmp_path)
    again = load(str(tmp_path))
    assert isinstance(again.model, Decoder)
    assert (again.eos_ids, again.context) == (trained.eos_ids, trained.context)
    pairs = zip(again.model.named_parameters(), trained.model.named_parameters(), strict=True)
    assert all(name == other and torch.equal(p, q) for (name, p), (other, q) in pairs)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    save(again, tmp_path)
    assert first == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_hugging_faces_copy_of_ours_loads_back_too(
    trained: Policy, tmp_path: Path, oracle: Callable[..., Tensor]
) -> None:
    """A folder that went through transformers, tokenizer included, as another trainer would leave it."""
    save(trained, tmp_path / "ours")
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        auto.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    again = load(str(tmp_path / "theirs"))
    row = trained.tokenizer.encode("<|user|>sort: dcab<eos><|assistant|>abcd<eos>")
    assert again.tokenizer.encode("<|user|>sort: dcab<eos><|assistant|>abcd<eos>") == row
    torch.testing.assert_close(oracle(again.model, row), oracle(trained.model, row), rtol=0, atol=1e-5)


def test_all_eos_ids_of_the_generation_config_count(trained: Policy, tmp_path: Path) -> None:
    save(trained, tmp_path)
    for stated, expected in (([10, 257], (10, 257)), (10, (10, 257)), (None, (257,))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
        assert load(str(tmp_path)).eos_ids == expected


def test_dtype_and_evaluation_mode() -> None:
    for dtype, stored, computed in (
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.float32, torch.bfloat16),
        ("float64", torch.float64, torch.float64),
    ):
        policy = load("tiny", dtype=dtype)
        assert {p.dtype for p in policy.model.parameters()} == {stored}
        assert policy.compute_dtype == computed
        assert not policy.model.training
        assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    with pytest.raises(NovaError, match="unknown dtype 'fp8'"):
        load("tiny", dtype="fp8")


def test_the_seed_decides_the_weights() -> None:
    first, same, other = (load("tiny", seed=seed).model.lm_head.weight for seed in (4, 4, 5))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("runs/mine", "runs/mine/checkpoints/latest/model"),
        ("runs/mine/checkpoints", "runs/mine/checkpoints/latest/model"),
        ("runs/mine/checkpoints/step-4", "runs/mine/checkpoints/step-4/model"),
    ],
)
def test_of_a_runs_models_the_latest_is_advised(
    named: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny, checkpoints = load("tiny"), Path("runs/mine/checkpoints")
    for step in ("step-4", "step-6"):
        save(tiny, checkpoints / step / "model")
    (checkpoints / "latest").symlink_to("step-6", target_is_directory=True)
    with pytest.raises(NovaError) as raised:
        load(named)
    assert str(raised.value).endswith(f"(did you mean {meant}?)")
    load(meant)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/at/all", "no such directory"),
        ("./nowhere", "no such directory"),
        ("run/nowhere", "no such directory"),
        ("", "no model was given"),
        ("file.txt", "this is a file"),
        ("empty", "contains no config.json"),
        ("run", r"did you mean run/checkpoints/step-1/model\?"),
        ("mangled", "not valid JSON|could not be loaded"),
        ("unknown", "no causal language model could be loaded"),
        ("weightless", "no causal language model could be loaded"),
        ("torn", "the weights cannot be read"),
        ("list", "not a JSON object"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("x")
    Path("empty").mkdir()
    tiny = load("tiny")
    for directory in ("run/checkpoints/step-1/model", "mangled", "unknown", "weightless", "torn", "list"):
        save(tiny, directory)
    Path("mangled/config.json").write_text("{")
    Path("unknown/config.json").write_text('{"model_type": "telepathy"}')
    Path("weightless/model.safetensors").unlink()
    Path("torn/model.safetensors").write_bytes(Path("torn/model.safetensors").read_bytes()[:1000])
    Path("list/config.json").write_text("[]")
    with pytest.raises(NovaError, match=message) as raised:
        load(name)
    assert name in str(raised.value) or not name
    assert "\n" not in str(raised.value)


def test_a_hub_id_without_a_network_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NovaError) as raised:
        load("nobody/no-such-model")
    assert str(raised.value).startswith("nobody/no-such-model: no causal language model could be loaded: ")


def test_the_built_in_models_need_no_transformers(tmp_path: Path) -> None:
    """Which would cost seconds: built, used, saved and loaded back without it."""
    code = f"""
import sys
from novarl.models.load import load, save
policy = load("tiny")
save(policy, {str(tmp_path)!r})
text = policy.tokenizer.apply_chat_template([{{"role": "user", "content": "hi"}}], tokenize=False)
load({str(tmp_path)!r}).tokenizer.encode(text)
assert "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
