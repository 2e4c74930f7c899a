"""Where a NaN comes from is named: weight, input, layer with sample and token, or backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from novarl.core.types import Batch, Sequence
from novarl.data.pack import pack_sequences
from novarl.learn.origin import find_origin
from novarl.learn.scorer import Scorer
from novarl.models.tiny import build
from tests.compose.harness import ON_TASK, events, novarl

PROMPT = 3


def batch(*lengths: int) -> Batch:
    """Answers of different lengths after prompts of PROMPT tokens; token ids tell samples apart."""
    return pack_sequences([_sequence(number, length) for number, length in enumerate(lengths)])


def _sequence(number: int, length: int) -> Sequence:
    size = PROMPT + length
    mask = (False,) * PROMPT + (True,) * length
    tokens = tuple(40 + 10 * number + place for place in range(size))
    return Sequence(tokens, mask, (0.0,) * size, (0.0,) * size, (0,) * size)


def test_a_weight(scorer: Scorer) -> None:
    name, weight = list(scorer.model.named_parameters())[3]
    with torch.no_grad():
        weight.view(-1)[0] = math.inf
    assert find_origin(scorer, batch(4, 5), {}, {}) == f"the weight {name} is not finite, since an earlier update"


def test_an_input_with_its_sample_and_token(scorer: Scorer) -> None:
    given = batch(4, 5)
    column = torch.zeros_like(given.behavior_logp)
    column[0] = math.nan  # of a prompt, where no loss is
    column[7 + PROMPT + 2] = math.nan
    found = find_origin(scorer, given, {"old_logp": None, "the advantage": column}, {})
    assert found == f"the advantage is nan in sample 1, token {PROMPT + 2}"


def test_a_layer_with_its_sample_and_token(scorer: Scorer) -> None:
    given, token = batch(4, 5, 6), PROMPT + 2
    bad = int(given.tokens[7 + token])
    layers = [name for name, module in scorer.model.named_modules() if name.endswith("mlp")]
    with _nan_after(scorer.model, layers[1], given, bad):
        found = find_origin(scorer, given, {}, {})
    assert found == f"the output of layer {layers[1]} in sample 1, token {token}"


def test_the_backward_pass(scorer: Scorer) -> None:
    gradients = {"a": torch.zeros(2), "b": torch.tensor([math.nan]), "c": torch.tensor([math.inf])}
    assert "backward pass, at the gradient of c and 1 others" in find_origin(scorer, batch(4), {}, gradients)
    assert "their sum overflows" in find_origin(scorer, batch(4), {}, {"a": torch.zeros(2)})


def test_a_run_that_ends_so_says_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from novarl.learn.credit import CreditRule

    call = CreditRule.__call__

    def broken(self: CreditRule, batch: Batch, *rest: object, **options: object) -> object:
        credit, about, ema = call(self, batch, *rest, **options)
        credit.advantage[batch.mask.nonzero()[-1]] = math.nan
        return credit, about, ema

    monkeypatch.setattr(CreditRule, "__call__", broken)
    ended = novarl("rl", *ON_TASK, f"run_dir={tmp_path / 'run'}")
    assert ended.code == 2 and "not finite (norm nan): the advantage is nan in sample 3, token" in ended.err
    (alert,) = [event for event in events(tmp_path / "run", "alert") if event.get("alert") == "nan"]
    assert "the advantage is nan in sample 3, token" in alert["evidence"] and alert["severity"] == "critical"


@contextmanager
def _nan_after(model: nn.Module, layer: str, given: Batch, token: int) -> Iterator[None]:
    """The layer's output is NaN where the input of the model is `token`."""
    now: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        now[:] = [inputs[0]]

    def spoil(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        wrong = (now[0] == token).reshape(output.shape[:-1])
        return output.masked_fill(wrong[..., None], math.nan)

    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    handles = [embedding.register_forward_pre_hook(note), model.get_submodule(layer).register_forward_hook(spoil)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.fixture
def scorer() -> Scorer:
    return Scorer(build("tiny", 0)[0])
