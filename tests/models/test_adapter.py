"""Folders with an adapter: alone it is merged into its base; beside a model's weights it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from novarl.compose.resolve import is_small
from novarl.core.errors import NovaError
from novarl.core.types import Sequence
from novarl.data.pack import pack_sequences
from novarl.models.forward import token_logprobs
from novarl.models.load import load, save
from novarl.models.lora import LoraSettings, inject, merged


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """(a base, an adapter of it that changes something)."""
    save(load("tiny"), tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"]),
    )
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter"


def test_an_adapter_alone_is_merged_into_its_base(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    tokens = torch.arange(40, 60)
    with torch.no_grad():
        wanted = theirs(tokens[None]).logits[0].log_softmax(-1)[range(19), tokens[1:]]
    batch = pack_sequences(
        [Sequence(tuple(tokens.tolist()), (False,) + (True,) * 19, (0.0,) * 20, (0.0,) * 20, (0,) * 20)]
    )
    with torch.no_grad():
        found, plain = (token_logprobs(load(str(place)).model, batch)[0][1:] for place in (adapter, base))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert (found - plain).abs().max() > 0.01
    assert is_small(str(adapter))


def test_full_weights_beside_an_adapter_are_refused(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    (base / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    with pytest.raises(NovaError, match=r"contains both a model .* and an adapter .*"):
        load(str(base))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base_model_name_or_path": "someone/model"}, "its base model is not a local directory: 'someone/model'"),
        ({"base_model_name_or_path": None}, "its base model is not a local directory: None"),
        ({"use_dora": True}, "only plain LoRA adapters are supported, not use_dora"),
        ({"peft_type": "IA3"}, "only plain LoRA adapters are supported, not peft_type=IA3"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(folders: tuple[Path, Path], changes: dict, said: str) -> None:
    file = folders[1] / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(NovaError, match=said):
        load(str(folders[1]))


def test_an_adapter_of_another_model_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    save(load("small"), tmp_path / "other")
    file = folders[1] / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "other")}))
    with pytest.raises(NovaError, match=r"does not exist in the base model given by adapter_config\.json"):
        load(str(folders[1]))
    (folders[1] / "adapter_model.safetensors").unlink()
    with pytest.raises(NovaError, match=r"adapter_model.safetensors is missing"):
        load(str(folders[1]))


def test_mamba_takes_adapters_but_for_the_layers_its_kernels_read() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, state_size=4)).eval()
    before = model(torch.arange(8)[None]).logits
    inject(model, LoraSettings(2, 4.0), seed=0)
    assert torch.equal(model(torch.arange(8)[None]).logits, before)
    adapted = {name.rpartition(".")[2] for name, part in model.named_modules() if hasattr(part, "lora_A")}
    assert adapted and "out_proj" not in adapted
    assert torch.allclose(merged(model)(torch.arange(8)[None]).logits, before)
    fresh = MambaForCausalLM(MambaConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(NovaError, match="no linear layer is named out_proj"):
        inject(fresh, LoraSettings(2, 4.0, ("out_proj",)), seed=0)
