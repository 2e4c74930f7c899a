"""The frozen copy stays as it is while the policy moves."""

from __future__ import annotations

import torch

from novarl.models.load import load
from novarl.models.reference import frozen_copy


def test_a_frozen_copy_has_its_own_weights_and_no_gradients() -> None:
    policy = load("tiny").model
    reference = frozen_copy(policy)
    before = reference.lm_head.weight.clone()
    with torch.no_grad():
        policy.lm_head.weight.add_(1.0)
    assert torch.equal(reference.lm_head.weight, before)
    assert not torch.equal(policy.lm_head.weight, before)
    assert reference.lm_head.weight is reference.model.embed_tokens.weight
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in policy.parameters())
    assert not reference.training
