"""A config.json with absurd numbers ends in one sentence, before memory is exhausted."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from novarl.core.errors import NovaError
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.files import check_numbers
from novarl.models.load import load, save

ABSURD: list[Any] = [-1, -(10**12), 10**7, 10**12, 10**400, float("nan"), float("inf"), 1e308, "many", [1], {"a": 1}]
SHAPE = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": None}
FAMILIES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, intermediate_size=48, max_position_embeddings=64),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "mixtral": lambda: transformers.MixtralConfig(
        **SHAPE, intermediate_size=16, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64
    ),
    "own": None,
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """What asks for more than a GiB beside what is in use fails, instead of filling the machine."""
    lines = Path("/proc/self/status").read_text().splitlines()
    used = 1024 * int(next(line for line in lines if line.startswith("VmData")).split()[1])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def make(folder: Path, family: str) -> str:
    if FAMILIES[family] is None:
        save(load("tiny"), folder)
    else:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(folder)
        ByteTokenizer().save_pretrained(folder)
    return str(folder)


def fields(values: dict[str, Any]) -> list[str]:
    return [name for name, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absurd_number_is_one_sentence_or_changes_nothing(family: str, tmp_path: Path, little_memory: None) -> None:
    name = make(tmp_path, family)
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())
    refused = 0
    for field in fields(good):
        for value in ABSURD:
            path.write_text(json.dumps({**good, field: value}).replace('"1e308"', "1e308"))
            try:
                load(name)  # which looks whether its logits are finite
            except NovaError as error:
                refused += 1
                said = str(error)
                assert len(said) < 700 and "\n" not in said and "allocate" not in said, (field, value, said)
                assert name in said and error.fix, (field, value, said)
    assert refused > 5 * len(fields(good)), "most are refused"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_hidden_layers", 10**12, "num_hidden_layers is 1000000000000, but the maximum is 2000 layers"),
        ("n_layer", 10**7, "n_layer is 10000000, but the maximum is 2000 layers"),
        ("hidden_size", -(10**400), "hidden_size is about -1e400, which is too large"),
        ("text_config", {"num_hidden_layers": 5000}, "text_config.num_hidden_layers is 5000, but the maximum"),
        ("rope_theta", float("nan"), "rope_theta is NaN"),
        ("eos_token_id", [1, 10**30], "eos_token_id is about 1e30, which is too large"),
    ],
)
def test_the_field_is_named(field: str, value: Any, said: str) -> None:
    with pytest.raises(NovaError) as raised:
        check_numbers({"model_type": "llama", field: value}, "config.json", "fix it")
    assert str(raised.value).startswith(f"config.json: {said}")


def test_numbers_of_real_models_pass() -> None:
    real = {"rope_theta": 1e11, "max_position_embeddings": 10_485_760, "num_hidden_layers": 126, "vocab_size": 262_144}
    check_numbers({**real, "time_step_limit": [0.0, float("inf")], "sliding_window": 2**31}, "config.json", "fix it")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("family", ["llama", "own"])
def test_deep_nesting_is_one_sentence(family: str, file: str, tmp_path: Path) -> None:
    name = make(tmp_path, family)
    (tmp_path / file).write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(NovaError) as raised:
        load(name)
    assert f"{file}: the file is nested too deeply" in str(raised.value)
