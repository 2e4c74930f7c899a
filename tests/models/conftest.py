"""A built-in model that has learnt something: on untrained ones near-ties and tiny gradients hide mistakes."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from novarl.models.load import Policy, load

TEXTS = ("<|user|>sort: dcab<eos><|assistant|>abcd<eos>", "<|user|>héllo?<eos><|assistant|>wörld 🎉!<eos>", "a byte")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def flat_batch(rows: list[list[int]]) -> SimpleNamespace:
    """Rows of tokens (some may be empty) packed on one axis."""
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n) for n in lengths])
    return SimpleNamespace(
        rows=rows,
        tokens=torch.tensor([token for row in rows for token in row], dtype=torch.int64),
        position_ids=positions,
        prev=torch.where(positions > 0, torch.arange(len(positions)) - 1, -1),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)]),
    )


@pytest.fixture(scope="session")
def flat():
    return flat_batch


def oracle_logprobs(model: torch.nn.Module, row: list[int]) -> torch.Tensor:
    """log pi of a row's second to last tokens, from one plain forward pass of that row alone."""
    ids = torch.tensor([row])
    positions = torch.arange(len(row))[None]
    if hasattr(model, "generate"):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    else:
        logits = model.lm_head(model(ids, position_ids=positions).last_hidden_state)
    return logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


@pytest.fixture(scope="session")
def oracle():
    return oracle_logprobs


def sharpen_model(model: torch.nn.Module, rows: list[list[int]]) -> None:
    """Trains `model` to know `rows` nearly by heart: mean log-probability above -0.5."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(200):
        logp = torch.cat([oracle_logprobs(model, row) for row in rows if len(row) > 1]).mean()
        if logp > -0.3:
            return
        optimizer.zero_grad()
        (-logp).backward()
        optimizer.step()
    raise AssertionError(f"the model did not learn its rows: {logp:.2f}")


@pytest.fixture(scope="session")
def sharpen():
    return sharpen_model


@pytest.fixture(scope="session", params=[True, False], ids=["tied", "untied"])
def trained(request: pytest.FixtureRequest) -> Policy:
    """`tiny`, tied and untied, that knows TEXTS nearly by heart."""
    policy = load("tiny", seed=1, tied=request.param)
    sharpen_model(policy.model, [policy.tokenizer.encode(text) for text in TEXTS])
    return policy
