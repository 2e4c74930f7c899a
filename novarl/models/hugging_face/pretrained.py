"""Models and tokenizers of Hugging Face transformers: loading, preparing for training, saving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from novarl.core.errors import NovaError
from novarl.core.types import Tokenizer
from novarl.kernels.fused import FullLinear
from novarl.models.adopt import adopt
from novarl.models.forward import head
from novarl.models.hugging_face.failures import MEND, NAMES, explained, quiet
from novarl.models.hugging_face.packed import enable_packing, packing_obstacle
from novarl.models.hugging_face.probes import TOLERANCE, check_model, distance
from novarl.models.hugging_face.reading import read_model
from novarl.models.transformer import Decoder, Embedding
from novarl.models.trust import NOTHING, Trust

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")

COPY_TOKENIZER = "copy tokenizer.json and tokenizer_config.json from the original model"


def load_pretrained(
    name: str, *, dtype: torch.dtype, device: torch.device, gradient_checkpointing: bool = False, trust: Trust = NOTHING
) -> tuple[Any, Tokenizer, str | None]:
    """Model (as `to_learn_from` makes it, with all dropout and router jitter 0), tokenizer, and why packing is not
    supported (None: it is), from a directory or Hub id. Code is run and pickles are read only if `trust` allows it.
    NovaError: anything is missing, unknown or unsupported."""
    model = read_model(name, dtype, trust).to(device)
    model, obstacle = to_learn_from(model, name, gradient_checkpointing=gradient_checkpointing)
    tokenizer = load_tokenizer(name, trust=trust)
    if len(tokenizer) > head(model)[0].size(0):  # type: ignore[arg-type]
        raise NovaError(
            f"the tokenizer has {len(tokenizer)} tokens, the model only {head(model)[0].size(0)}",  # type: ignore[arg-type]
            where=name,
            fix="resize the model's embeddings, or use its own tokenizer",
        )
    return model, tokenizer, obstacle


def to_learn_from(model: Any, name: str, *, gradient_checkpointing: bool = False) -> tuple[Any, str | None]:
    """A transformers model prepared for training, and why it does not support packing (None: it does). If the built-in
    decoder replaces it, the decoder shares its tensors."""
    with explained(name, f"{type(model).__name__} cannot be run", fix=MEND):
        check_model(model, name)
        decoder = adopt(model) if packing_obstacle(model.config) is None else None
        if decoder is not None and distance(decoder, model) <= TOLERANCE:
            decoder.model.gradient_checkpointing = gradient_checkpointing
            return decoder.eval(), None
    if type(embedding := model.get_input_embeddings()) is nn.Embedding:  # other classes may do more than look up
        embedding.__class__ = Embedding
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FullLinear
    obstacle = enable_packing(model)
    if gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise NovaError(f"{type(model).__name__} has no gradient checkpointing", where=name)
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        model.train()  # transformers recomputes only in training mode, and nothing else depends on the mode
    return model, obstacle


def save_pretrained(model: Any, directory: str, *, eos_ids: Sequence[int]) -> None:
    """Save a transformers model (an adopted one in its original form): weights and configs, with all eos ids."""
    with quiet():
        origin = model.origin if isinstance(model, Decoder) else None
        generation = (origin or model).generation_config
        stated = generation.eos_token_id
        if set(eos_ids) != set(stated if isinstance(stated, list) else [stated]):
            generation.eos_token_id = list(eos_ids)
        if origin is None:
            model.save_pretrained(directory)
        else:
            origin.config.save_pretrained(directory)
            origin.generation_config.save_pretrained(directory)
            model.save_weights(Path(directory))


def load_tokenizer(name: str, *, trust: Trust = NOTHING) -> Tokenizer:
    """The tokenizer from a directory or Hub id. A missing pad token is set to eos (masks use lengths)."""
    from transformers import AutoTokenizer

    directory = Path(name)
    if directory.is_dir() and not any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise NovaError("the directory contains no tokenizer files", where=name, fix=COPY_TOKENIZER)
    with explained(name, "no tokenizer could be loaded", fix=COPY_TOKENIZER if directory.is_dir() else NAMES):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust.runs_code(name))
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # transformers makes one up if it finds no vocabulary
        raise NovaError("the tokenizer files contain no vocabulary", where=name, fix=COPY_TOKENIZER)
    settle_tokenizer(tokenizer, name)
    return tokenizer  # type: ignore[no-any-return]


def settle_tokenizer(tokenizer: Any, name: str) -> None:
    """Set a missing pad token to eos. Raises NovaError without an eos token."""
    if tokenizer.eos_token_id is None:
        raise NovaError(
            "the tokenizer has no eos token to end completions",
            where=name,
            fix="set eos_token in tokenizer_config.json",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
