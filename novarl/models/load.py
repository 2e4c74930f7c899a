"""Load a policy by name (built-in, a directory, or a Hub id), and save it to a directory.

Built-in models, also when saved to a directory, load without transformers.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from novarl.core.errors import NovaError
from novarl.core.types import Tokenizer
from novarl.distributed.shard import gather, sharding_of
from novarl.kernels.attention import COMMON_SIZE, choose_kernel
from novarl.models import tiny
from novarl.models.adapter import base_of, holds_adapter, merge_adapter
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.files import WHOLE, read_json
from novarl.models.forward import head
from novarl.models.lora import merged
from novarl.models.plain import PlainModel
from novarl.models.transformer import Decoder, DecoderConfig, Origin
from novarl.models.trust import NOTHING, Trust

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Accepted values of `dtype`. With bfloat16 the weights are still float32, and matrix products use bfloat16."""

JSON_FILES = (
    "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"
)  # fmt: skip
"""JSON files of a model directory; transformers would not say which one is invalid."""

UNSTATED_CONTEXT = 32_768
"""The default context length of a model."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A language model with everything needed to sample from it and train it. `eos_ids` end a completion, `context` is
    the maximum sequence length, `compute_dtype` the dtype of `forward`; `template_kwargs` are the chat template's
    arguments for every row, `template_date` is its current date. `padded_because` says why packing is not supported
    (None: it is), `context_because` why the context is shorter than configured (None: it is not)."""

    model: nn.Module
    tokenizer: Tokenizer
    name: str
    eos_ids: tuple[int, ...]
    context: int
    compute_dtype: torch.dtype = torch.float32
    padded_because: str | None = None
    context_because: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template_date: str | None = None

    @property
    def limit(self) -> str:
        """The context length as text."""
        return f"{self.context} tokens" + (f" ({self.context_because})" if self.context_because else "")

    def notes(self) -> list[str]:
        """Notes for the start of a run."""
        return [f"model context: {self.limit}"] if self.context_because else []


def load(
    name: str,
    *,
    seed: int = 0,
    tied: bool = True,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    attn: str = "auto",
    trust: Trust = NOTHING,
) -> Policy:
    """The policy called `name`: "tiny" or "small" (drawn from `seed`, head `tied` or not), a directory, or a Hub id.
    `attn`: the kernel for packed attention (`attention.choose_kernel`). `trust`: the models whose code may be run and
    whose pickles may be read, by default none. NovaError if `name` is not a causal language model."""
    if dtype not in COMPUTE_DTYPES:
        raise NovaError(f"unknown dtype '{dtype}'", where="dtype", fix=f"one of {', '.join(COMPUTE_DTYPES)}")
    compute_dtype, device = COMPUTE_DTYPES[dtype], torch.device(device)
    choose_kernel(attn, device, compute_dtype)  # fail before anything is read if it cannot run
    stored = torch.float64 if compute_dtype is torch.float64 else torch.float32
    if name in tiny.SIZES:
        decoder, tokenizer = tiny.build(name, seed, tied=tied)
        stated: Any = decoder.config.eos_token_id
    elif Path(name).is_dir() and holds_adapter(Path(name)):
        options: dict[str, Any] = {"dtype": dtype, "device": device, "attn": attn, "trust": trust}
        base = load(base_of(Path(name)), gradient_checkpointing=gradient_checkpointing, **options)
        return _adapted(base, Path(name), trust)
    else:
        _check_directory(name)
        own = _own_tokenizer(Path(name))
        if own is None:
            from novarl.models.hugging_face.pretrained import load_pretrained

            model, theirs, obstacle = load_pretrained(
                name, dtype=stored, device=device, gradient_checkpointing=gradient_checkpointing, trust=trust
            )
            if obstacle is not None and attn not in ("auto", "sdpa"):
                reason = f"it uses its own attention with padding ({obstacle})"
                raise NovaError(f"{name} cannot use it: {reason}", where=f"attn={attn}", fix="attn=auto")
            return pretrained_policy(
                model, theirs, obstacle, name, compute_dtype=compute_dtype, device=device, attn=attn
            )
        decoder, tokenizer = Decoder.load(name), own
        stated = read_json(Path(name, "generation_config.json")).get("eos_token_id")
    decoder.model.gradient_checkpointing = gradient_checkpointing
    decoder.packed_kernel = choose_kernel(attn, device, compute_dtype, head_size=decoder.config.head_dim)
    return Policy(
        model=decoder.to(device=device, dtype=stored).eval(),
        tokenizer=tokenizer,
        name=name,
        eos_ids=eos_ids_of(stated, tokenizer, name),
        context=decoder.config.max_position_embeddings,
        compute_dtype=compute_dtype,
    )


def save(policy: Policy, directory: str | Path) -> None:
    """Save model, generation config and tokenizer, for `load` and transformers. Adapters are merged in what is written
    only. All ranks of a sharded model call it; the first one writes."""
    model, sharding = merged(gather(policy.model)), sharding_of(policy.model)
    if sharding is not None and sharding.ranks.rank > 0:
        return
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PlainModel):  # how it is made again only its owner knows
        from safetensors.torch import save_model

        save_model(model.module, str(directory / "model.safetensors"))
    elif isinstance(model, Decoder) and model.origin is None:
        model.save(directory)
        ends = {"eos_token_id": list(policy.eos_ids), "pad_token_id": policy.tokenizer.pad_token_id}
        text = json.dumps(ends, indent=2, sort_keys=True)
        (directory / "generation_config.json").write_text(text + "\n", encoding="utf-8")
    else:
        from novarl.models.hugging_face.pretrained import save_pretrained

        save_pretrained(model, str(directory), eos_ids=policy.eos_ids)
    policy.tokenizer.save_pretrained(str(directory))


def _adapted(base: Policy, folder: Path, trust: Trust) -> Policy:
    """The base with the adapter in `folder` merged, and with the adapter's tokenizer, if any."""
    merge_adapter(base.model, folder)
    tokenizer, ends = base.tokenizer, base.eos_ids
    if (folder / "tokenizer_config.json").is_file() and ByteTokenizer.read(folder) is None:
        from novarl.models.hugging_face.pretrained import load_tokenizer

        tokenizer = load_tokenizer(str(folder), trust=trust)
        if len(tokenizer) > head(base.model)[0].size(0):  # type: ignore[arg-type]
            what = f"the adapter's tokenizer has {len(tokenizer)} tokens, above the base model's"  # type: ignore[arg-type]
            raise NovaError(what, where=str(folder), fix="use the tokenizer of the base model")
        ends = tuple(dict.fromkeys([*ends, tokenizer.eos_token_id]))
    return replace(base, name=str(folder), tokenizer=tokenizer, eos_ids=ends)


def pretrained_policy(
    model: Any,
    tokenizer: Any,
    obstacle: str | None,
    name: str,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
    attn: str,
) -> Policy:
    """The policy of a transformers model that is ready to train: loaded, or given as an object."""
    kernel = attn if obstacle is None else "auto"
    model.packed_kernel = choose_kernel(kernel, device, compute_dtype, head_size=_head_size(model.config))
    about: Origin = (model.origin if isinstance(model, Decoder) else None) or model
    context, because = context_of(about.config, tokenizer, name)
    return Policy(
        model=model,
        tokenizer=tokenizer,
        name=name,
        eos_ids=eos_ids_of(about.generation_config.eos_token_id, tokenizer, name),
        context=context,
        compute_dtype=compute_dtype,
        padded_because=obstacle,
        context_because=because,
    )


def _head_size(config: Any) -> int:
    """The size of an attention head, from a transformers configuration."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, heads = (getattr(text, name, None) for name in ("hidden_size", "num_attention_heads"))
    stated: int | None = getattr(text, "head_dim", None)
    return stated or (hidden // heads if hidden and heads else COMMON_SIZE)


def eos_ids_of(stated: Any, tokenizer: Tokenizer, name: str) -> tuple[int, ...]:
    """All eos ids of the generation config, plus the tokenizer's own."""
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if wrong := [value for value in ids if not isinstance(value, int) or abs(value) >= 2**31]:
        what, where = f"eos_token_id contains {wrong[0]!r}, which is not a token id", f"{name}/generation_config.json"
        raise NovaError(what, where=where, fix=f"fix it, or {WHOLE}")
    return tuple(dict.fromkeys([*ids, tokenizer.eos_token_id]))


def context_of(config: Any, tokenizer: Any, name: str) -> tuple[int, str | None]:
    """The maximum sequence length, and why it is shorter than the configuration states: transformers computes rotary
    embeddings for a batch from its longest row, so beyond some length ("dynamic" ones: the stated one) one long row
    would change the log-probabilities of all others."""
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None)
    if stated is None:
        stated = min(tokenizer.model_max_length, UNSTATED_CONTEXT)
    rotations = getattr(text, "rope_parameters", None) or {}
    steady = [
        rotation["original_max_position_embeddings"]
        for rotation in (rotations, *rotations.values())  # one for all layers, or one for each type of them
        if isinstance(rotation, dict) and rotation.get("rope_type") == "longrope"
    ]
    if (context := min([stated, *steady])) < 1:
        what = f"max_position_embeddings is {stated}, but must be positive"
        raise NovaError(what, where=f"{name}/config.json", fix=f"fix it, or {WHOLE}")
    if context == stated:
        return int(stated), None
    because = f"not the stated {stated}: with longrope a longer row would change the rotary embeddings of the others"
    return int(context), because


def _check_directory(name: str) -> None:
    """Raise NovaError if `name` is a path but not a model directory. Names that could be Hub ids pass."""
    if not name:
        raise NovaError("no model was given", where="model", fix="use tiny, small, a directory or a Hub id")
    path = Path(name)
    if path.is_dir():
        if (path / "config.json").is_file():
            for file in JSON_FILES:
                read_json(path / file)
            return
        inside = _model_within(path)
        fix = f"did you mean {inside}?" if inside else "it must contain config.json, weights and tokenizer files"
        raise NovaError("the directory contains no config.json, so it is not a model", where=name, fix=fix)
    if path.exists():
        raise NovaError("this is a file, not a model directory", where=name, fix="use its directory")
    beside = "/" in name and path.parent.is_dir()  # runs/nope: if the parent exists, a path is meant and not a Hub id
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or beside:
        raise NovaError("no such directory", where=name, fix="the built-in models are tiny and small")
    near = difflib.get_close_matches(name.lower(), tiny.SIZES, n=1, cutoff=0.75)
    if near and "/" not in name:  # the Hub would take half a minute to report that it does not exist
        raise NovaError("no such built-in model", where=f"model={name}", fix=f"did you mean {near[0]}?")


def _model_within(path: Path) -> Path | None:
    """A model inside a directory; for a run directory the latest checkpoint."""
    found = next((p.parent for p in sorted(path.glob("**/config.json")) if p.parent.name == "model"), None)
    if found is None or found.parent == path:
        return found
    latest = found.parents[1] / "latest" / "model"
    return latest if (latest / "config.json").is_file() else found


def _own_tokenizer(directory: Path) -> ByteTokenizer | None:
    """The tokenizer of a built-in model saved by `save`: a plain qwen3 with the byte tokenizer. None for other
    models."""
    if not (directory / "model.safetensors").is_file():
        return None
    if (tokenizer := ByteTokenizer.read(directory)) is None:
        return None
    return None if DecoderConfig.unsupported(read_json(directory / "config.json")) else tokenizer
