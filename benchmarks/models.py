"""The models of `make bench`: saved once, loaded by every side from the same files, with answers as long as wanted.

How long answers are decides what a step costs, so the weights themselves say it. A few coordinates of the residual
stream are kept free of the layers' writing; there each token of text carries its kind, text of a kind follows text of
the same kind, and each kind has its own odds of ending. So lengths are a mixture of geometric distributions: one kind
gives a plain law, a short and a long kind together a heavy tail. Tokens other than letters are practically never drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from novarl.models import tiny
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.load import Policy, save
from novarl.models.transformer import Decoder, DecoderConfig

TEXT = range(32, 127)
"""The ids of printable ASCII."""
ASSISTANT = 256 + 4
"""The last token of every prompt: after it the kind is drawn."""
LOUD, OWN = 20.0, 12.0
"""Nats by which text beats all other tokens, and text of the same kind beats text of another."""
PROBES, PROBE_LENGTH, ROUNDS = 16, 64, 5
"""Sequences of each kind on which the odds of ending are set, their length, and how often."""
FAINT = 1e-3
"""What is left of the weights of tokens that are of no kind. Zeros would become numbers near the least that a float
holds, by updates as small as their gradients, which many processors multiply many times slower."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model by its shape, and the law of its answers: (share of the answers, mean length) of each kind."""

    name: str
    law: tuple[tuple[float, float], ...]
    config: dict[str, Any]
    seed: int = 0


def save_model(shape: Shape, home: Path) -> Path:
    """The folder of the model, written where it is not there yet."""
    folder = home / shape.name
    if not (folder / "config.json").exists():
        torch.manual_seed(shape.seed)
        decoder, tokenizer = build(shape), ByteTokenizer()
        obey(decoder, shape.law, end=tokenizer.eos_token_id)
        save(Policy(decoder, tokenizer, shape.name, (tokenizer.eos_token_id,), 4096), folder)
    return folder


def build(shape: Shape) -> Decoder:
    """A fresh decoder: the built-in one of that name, or one of its own shape."""
    if shape.name.split("-")[0] in tiny.SIZES:
        return tiny.build(shape.name.split("-")[0], shape.seed)[0]
    ends: dict[str, Any] = {"eos_token_id": ByteTokenizer.eos_token_id, "pad_token_id": ByteTokenizer.pad_token_id}
    return Decoder(
        DecoderConfig(**shape.config, **ends, initializer_range=shape.config["hidden_size"] ** -0.5), seed=shape.seed
    )


@torch.no_grad()
def obey(model: Decoder, law: Sequence[tuple[float, float]], *, end: int) -> None:
    """Change the weights in place so that answers follow the law. The head must be tied to the embedding."""
    kinds, weight = len(law), model.model.embed_tokens.weight
    layers: list[Any] = list(model.model.layers)
    for layer in layers:
        layer.self_attn.o_proj.weight[: kinds + 1] = 0.0
        layer.mlp.down_proj.weight[: kinds + 1] = 0.0
    weight[:, : kinds + 1] *= FAINT
    weight[:, 0] = -1.0
    weight[list(TEXT), 0], weight[ASSISTANT, 0] = 1.0, 0.5
    members = _members([share for share, _ in law])
    for kind, tokens in enumerate(members, start=1):
        weight[tokens, kind] = 1.0
    weight[end] = 0.0
    weight[end, : kinds + 1] = 1.0
    gain = model.model.norm.weight
    gain[: kinds + 1] = 1.0
    loud = torch.stack([_states(model, tokens)[..., 0].mean() for tokens in members]).mean()
    gain[0], gain[1 : kinds + 1] = LOUD / loud, OWN / loud
    for _ in range(ROUNDS):
        for kind, (tokens, (_, mean)) in enumerate(zip(members, law, strict=True), start=1):
            states = _states(model, tokens)
            hazard = (states @ weight.T).softmax(-1)[..., end].mean().item()
            wanted = 1.0 / mean
            missing = math.log(wanted / (1 - wanted)) - math.log(hazard / (1 - hazard))
            weight[end, kind] += missing / states[..., kind].mean()


def _members(shares: Sequence[float]) -> list[list[int]]:
    """The text's ids dealt out to the kinds by their shares, each kind's spread over the alphabet."""
    drawn = torch.randperm(len(TEXT), generator=torch.Generator().manual_seed(0)).tolist()
    edges = [round(sum(shares[:count]) * len(TEXT)) for count in range(len(shares) + 1)]
    return [[TEXT[index] for index in drawn[low:high]] for low, high in pairwise(edges)]


def _states(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """The final hidden states [PROBES, PROBE_LENGTH, D] in random text of one kind."""
    draw = torch.randint(len(tokens), (PROBES, PROBE_LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(PROBE_LENGTH).expand(PROBES, PROBE_LENGTH)
    return model(torch.tensor(tokens)[draw], position_ids=positions).last_hidden_state
