"""A policy by name: built in, from a directory, or from the hub; and back to a directory.

The built-in models, and directories that hold one, load without transformers.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from novarl.core.errors import NovaError
from novarl.kernels.attention import COMMON_SIZE, choose_kernel
from novarl.models import tiny
from novarl.models.adapter import base_of, holds_adapter, merge_adapter
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.forward import head
from novarl.models.lora import merged
from novarl.models.plain import PlainModel
from novarl.models.transformer import WHOLE, Decoder, DecoderConfig, Origin
from novarl.models.trust import NOTHING, Trust

if TYPE_CHECKING:
    from novarl.core.types import Tokenizer

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""`dtype` as users say it. Weights are float32 also under bfloat16, which then names the dtype of matrix products."""

JSON_FILES = (
    "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"
)  # fmt: skip
"""Files of a model directory that hold an object each; which of them does not, transformers would not say."""

UNSTATED_CONTEXT = 32_768
"""The context of a model that states none."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A language model and all that is needed to sample from it and to train it.

    `eos_ids` are all ids that end a completion, `context` is the longest sequence the model takes, `compute_dtype` the
    dtype to run `forward` in, `template_kwargs` what the chat template is given beside the messages of every row,
    `template_date` the day that a template which writes the date is given, `padded_because`
    why the model cannot take packed sequences (None: it can),
    `context_because` why its context is shorter than its configuration says (None: it is not).
    """

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
        """The context, in words."""
        return f"{self.context} tokens" + (f" ({self.context_because})" if self.context_because else "")

    def notes(self) -> list[str]:
        """What should be known of a run on it."""
        return [f"the model's context is {self.limit}"] if self.context_because else []


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
    """The policy called `name`: "tiny" or "small" (fresh from `seed`, head `tied` or not), a directory, or a hub id.

    `attn`: what computes attention where sequences are packed, "auto" or a kernel's name (`attention.choose_kernel`).
    `trust`: of which models code and pickles may be run and read; by default of none.
    Raises NovaError where `name` is none of these, or holds something other than a causal language model.
    """
    if dtype not in COMPUTE_DTYPES:
        raise NovaError(f"unknown dtype '{dtype}'", where="dtype", fix=f"one of {', '.join(COMPUTE_DTYPES)}")
    compute_dtype, device = COMPUTE_DTYPES[dtype], torch.device(device)
    choose_kernel(attn, device, compute_dtype)  # what cannot run is refused before anything is read
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
            policy = _load_pretrained(
                name, stored, compute_dtype, device, gradient_checkpointing=gradient_checkpointing, trust=trust
            )
            if policy.padded_because is not None and attn not in ("auto", "sdpa"):
                reason = f"it runs through its own attention, padded ({policy.padded_because})"
                raise NovaError(f"{name} takes no other: {reason}", where=f"attn={attn}", fix="attn=auto")
            size = head_size(policy.model.config)
            policy.model.packed_kernel = choose_kernel(  # type: ignore[assignment]
                attn, device, compute_dtype, head_size=size
            )
            return policy
        decoder, tokenizer = _read_decoder(Path(name)), own
        stated = _read_json(Path(name, "generation_config.json")).get("eos_token_id")
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
    """Writes model, generation config and tokenizer, for `load` and for `AutoModelForCausalLM.from_pretrained`.

    Adapters are merged into what is written; the model itself stays as it is.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    model = merged(policy.model)
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
    """The base with the adapter in `folder` merged, and with the tokenizer that lies beside the adapter, if any."""
    merge_adapter(base.model, folder)
    tokenizer, ends = base.tokenizer, base.eos_ids
    if (folder / "tokenizer_config.json").is_file() and ByteTokenizer.read(folder) is None:
        from novarl.models.hugging_face.pretrained import load_tokenizer

        tokenizer = load_tokenizer(str(folder), trust=trust)
        if len(tokenizer) > head(base.model)[0].size(0):  # type: ignore[arg-type]
            what = f"the adapter's tokenizer has {len(tokenizer)} tokens, more than its base model"  # type: ignore[arg-type]
            raise NovaError(what, where=str(folder), fix="take the tokenizer that belongs to the base model")
        ends = tuple(dict.fromkeys([*ends, tokenizer.eos_token_id]))
    return replace(base, name=str(folder), tokenizer=tokenizer, eos_ids=ends)


def _load_pretrained(
    name: str,
    stored: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device,
    *,
    gradient_checkpointing: bool,
    trust: Trust,
) -> Policy:
    from novarl.models.hugging_face.pretrained import load_pretrained

    model, tokenizer, obstacle = load_pretrained(
        name, dtype=stored, device=device, gradient_checkpointing=gradient_checkpointing, trust=trust
    )
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


def head_size(config: Any) -> int:
    """Of one attention head, as configurations of transformers state it."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, heads = (getattr(text, name, None) for name in ("hidden_size", "num_attention_heads"))
    stated: int | None = getattr(text, "head_dim", None)
    return stated or (hidden // heads if hidden and heads else COMMON_SIZE)


def eos_ids_of(stated: Any, tokenizer: Tokenizer, name: str) -> tuple[int, ...]:
    """All eos ids that the generation config states, then the tokenizer's own if it is not among them."""
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if wrong := [value for value in ids if not isinstance(value, int) or abs(value) >= 2**31]:
        what, where = f"eos_token_id holds {wrong[0]!r}, which is no token id", f"{name}/generation_config.json"
        raise NovaError(what, where=where, fix=f"mend it, or {WHOLE}")
    return tuple(dict.fromkeys([*ids, tokenizer.eos_token_id]))


def context_of(config: Any, tokenizer: Any, name: str) -> tuple[int, str | None]:
    """The longest sequence, and why it is shorter than what the configuration states.

    transformers rotates a whole batch as its longest row asks: beyond some length, one long row would change the
    log-probabilities of all others. For "dynamic" rotations that is the stated length.
    """
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
        what = f"max_position_embeddings is {stated}, which leaves no room for a token"
        raise NovaError(what, where=f"{name}/config.json", fix=f"mend it, or {WHOLE}")
    if context == stated:
        return int(stated), None
    because = f"not the {stated} it states: a longer row would change the rotations, longrope, of those beside it"
    return int(context), because


def _check_directory(name: str) -> None:
    """Raises NovaError where `name` is a path, and not that of a model; a name that could be a hub id passes."""
    if not name:
        raise NovaError("no model is named", where="model", fix="tiny, small, a directory or a hub id")
    path = Path(name)
    if path.is_dir():
        if (path / "config.json").is_file():
            for file in JSON_FILES:
                _read_json(path / file)
            return
        inside = _model_within(path)
        fix = f"did you mean {inside}?" if inside else "it must hold config.json, weights and tokenizer files"
        raise NovaError("the directory holds no config.json, so it is no model", where=name, fix=fix)
    if path.exists():
        raise NovaError("this is a file, not a model directory", where=name, fix="give the directory it lies in")
    beside = "/" in name and path.parent.is_dir()  # runs/nope: who has such a folder means it, not the hub
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or beside:
        raise NovaError("no such directory", where=name, fix="the built-in models are tiny and small")
    near = difflib.get_close_matches(name.lower(), tiny.SIZES, n=1, cutoff=0.75)
    if near and "/" not in name:  # the hub, asked for such a name, would only after half a minute say that it has none
        raise NovaError("no such built-in model", where=f"model={name}", fix=f"did you mean {near[0]}?")


def _model_within(path: Path) -> Path | None:
    """A model that lies within a directory: of a run's the latest, which the link to it names."""
    found = next((p.parent for p in sorted(path.glob("**/config.json")) if p.parent.name == "model"), None)
    if found is None or found.parent == path:
        return found
    latest = found.parents[1] / "latest" / "model"
    return latest if (latest / "config.json").is_file() else found


def _own_tokenizer(directory: Path) -> ByteTokenizer | None:
    """The tokenizer of what `save` writes for a built-in model: a plain qwen3 with the byte tokenizer.

    None: `directory` holds something else.
    """
    if not (directory / "model.safetensors").is_file():
        return None
    if (tokenizer := ByteTokenizer.read(directory)) is None:
        return None
    return None if DecoderConfig.unsupported(_read_json(directory / "config.json")) else tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file. Raises NovaError where it holds something else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise NovaError(f"not valid JSON: {error}", where=str(path), fix=WHOLE) from error
    except RecursionError as error:
        raise NovaError("the file is nested too deeply", where=str(path), fix=WHOLE) from error
    if not isinstance(value, dict):
        raise NovaError("not a JSON object", where=str(path), fix=WHOLE)
    return value


def _read_decoder(directory: Path) -> Decoder:
    from safetensors import SafetensorError

    try:
        return Decoder.load(directory)
    except (SafetensorError, OSError) as error:
        where = str(directory / "model.safetensors")
        raise NovaError(f"the weights cannot be read: {error}", where=where, fix=WHOLE) from error
