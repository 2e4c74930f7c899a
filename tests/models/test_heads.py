"""Scalar heads: zero at first, read where they should be, alike in every layout and family, saved bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.forward import backbone
from novarl.models.heads import (
    VALUE_HEAD,
    ScalarHead,
    ValueModel,
    last_positions,
    load_head,
    save_with_head,
    token_values,
    with_head,
)
from novarl.models.load import Policy, load
from tests.invariance.families import config

ROWS = [[256, 7, 9, 11, 13], [256, 8], [256, 1, 2, 3]]


def scattered(model: ValueModel, seed: int = 0) -> ValueModel:
    """Any weights but zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def by_hand(model: ValueModel, rows: list[list[int]]) -> Tensor:
    """The value at every token, each row by itself."""
    found = []
    for row in rows:
        ids, positions = torch.tensor([row]), torch.arange(len(row))[None]
        hidden = backbone(model.model)(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False)
        found.append((hidden.last_hidden_state[0] @ model.head.weight[0]) + model.head.bias)
    return torch.cat(found)


def test_a_new_head_says_zero_and_draws_no_number(flat: Any) -> None:
    policy = load("tiny")
    before = torch.get_rng_state()
    model = with_head(policy.model)
    assert torch.equal(before, torch.get_rng_state())
    batch = flat(ROWS)
    assert token_values(model, batch, positions=last_positions(batch)).tolist() == [0.0, 0.0, 0.0]
    assert {name for name, _ in model.head.named_parameters()} == {"weight", "bias"}


def test_values_are_those_of_each_row_alone(trained: Policy, flat: Any) -> None:
    model, batch = scattered(with_head(trained.model)), flat(ROWS)
    everywhere = by_hand(model, ROWS)
    assert everywhere.detach().std() > 0.1
    for layout in ("packed", "padded"):
        for positions in (torch.arange(11), torch.tensor([4]), torch.tensor([3, 3, 0]), last_positions(batch)):
            found = token_values(model, batch, positions=positions, layout=layout)
            torch.testing.assert_close(found, everywhere[positions])
    assert last_positions(batch).tolist() == [4, 6, 10]
    assert token_values(model, batch, positions=torch.tensor([], dtype=torch.int64)).shape == (0,)


def test_a_position_before_a_sequence_is_refused(flat: Any) -> None:
    model, batch = with_head(load("tiny").model), flat(ROWS)
    with pytest.raises(ValueError, match="positions must not be negative"):
        token_values(model, batch, positions=batch.prev)


@pytest.mark.parametrize("family", ["gpt2", "moe"])
def test_other_families(family: str, flat: Any, tmp_path: Path) -> None:
    import transformers

    transformers.AutoModelForCausalLM.from_config(config(family)).save_pretrained(tmp_path / "fresh")
    ByteTokenizer().save_pretrained(tmp_path / "fresh")
    policy = load(str(tmp_path / "fresh"))
    model, batch = scattered(with_head(policy.model)), flat(ROWS)
    found = token_values(model, batch, positions=torch.arange(11))
    assert found.detach().std() > 0.1
    torch.testing.assert_close(found, by_hand(model, ROWS), atol=1e-5, rtol=1e-4)
    save_with_head(policy, model.head, tmp_path)
    again = load(str(tmp_path))
    head = load_head(tmp_path, again.model)
    values = token_values(ValueModel(again.model, head), batch, positions=torch.arange(11))
    assert torch.equal(values, found)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_head_comes_back_bit_by_bit(dtype: str, flat: Any, tmp_path: Path) -> None:
    policy = load("tiny", dtype=dtype, tied=False)
    model, batch = scattered(with_head(policy.model)), flat(ROWS)
    save_with_head(policy, model.head, tmp_path)
    again = load(str(tmp_path), dtype=dtype)
    head = load_head(tmp_path, again.model)
    for one, two in zip(model.head.parameters(), head.parameters(), strict=True):
        assert torch.equal(one, two) and one.dtype == two.dtype
    for one, two in zip(policy.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
    positions = torch.arange(11)
    expected = token_values(model, batch, positions=positions)
    assert torch.equal(token_values(ValueModel(again.model, head), batch, positions=positions), expected)


def test_a_separate_backbone_is_a_copy_and_its_unread_head_is_frozen() -> None:
    for tied in (True, False):
        policy = load("tiny", tied=tied)
        critic = with_head(policy.model, separate=True)
        names = dict(critic.named_parameters())
        assert not {id(p) for p in policy.model.parameters()} & {id(p) for p in names.values()}
        frozen = {name for name, parameter in names.items() if not parameter.requires_grad}
        assert frozen == (set() if tied else {"model.lm_head.weight"})
        assert all(parameter.requires_grad for parameter in policy.model.parameters())


def test_a_shared_trunk_is_the_policys_and_learns_from_values(flat: Any) -> None:
    policy, batch = load("tiny"), flat(ROWS)
    critic = scattered(with_head(policy.model))
    assert critic.model is policy.model
    token_values(critic, batch, positions=last_positions(batch)).sum().backward()
    moved = {name for name, p in policy.model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moved == {name for name, _ in policy.model.named_parameters()}
    assert critic.head.bias.grad is not None and critic.head.bias.grad.tolist() == [3.0]


def test_the_head_keeps_its_precision_under_bfloat16(flat: Any) -> None:
    model, batch = scattered(with_head(load("tiny").model)), flat(ROWS)
    found = token_values(model, batch, positions=torch.arange(11), compute_dtype=torch.bfloat16)
    exact = token_values(model, batch, positions=torch.arange(11))
    assert found.dtype == torch.float32 and 0 < (found - exact).abs().max() < 0.05 * exact.abs().max()


def test_folders_without_a_fitting_head_are_refused(tmp_path: Path) -> None:
    policy = load("tiny")
    with pytest.raises(NovaError, match=r"value_head\.safetensors is missing"):
        load_head(tmp_path, policy.model)
    save_with_head(policy, ScalarHead(7), tmp_path)
    with pytest.raises(NovaError, match=r"the model.s size is"):
        load_head(tmp_path, policy.model)
    (tmp_path / VALUE_HEAD).write_bytes(b"\x00" * 20)
    with pytest.raises(NovaError, match="cannot be read"):
        load_head(tmp_path, policy.model)


def test_a_model_with_a_head_loads_as_a_plain_model(tmp_path: Path) -> None:
    policy = load("tiny")
    save_with_head(replace(policy, name="critic"), with_head(policy.model).head, tmp_path)
    plain: nn.Module = load(str(tmp_path)).model
    assert {name for name, _ in plain.named_parameters()} == {name for name, _ in policy.model.named_parameters()}
