"""Models and tokenizers through Hugging Face transformers: loading, the packed attention, and what must hold of them.

The only module that imports transformers, and only inside functions: the import costs seconds. What the library
assumes of a model is not taken on trust but measured once, after loading, on eight tokens: that it is causal, that its
logits are hidden @ head.T (+ bias), and that packing changes nothing.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from novarl.core.errors import NovaError
from novarl.models.adopt import adopt
from novarl.models.attention import PACKING_ATTENTION, packed_attention
from novarl.models.forward import head, hidden_states
from novarl.models.fused import FullLinear
from novarl.models.packing import Packing
from novarl.models.transformer import Decoder, Embedding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from novarl.core.types import Tokenizer

TOLERANCE = 1e-4
"""Largest difference, relative to the largest value, that the probes take for rounding (measured: about 1e-6)."""

LOGIT_TRANSFORMS = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
}
"""Attributes of a configuration that change logits after the head, with the values under which they do not."""

NAMES = "give a built-in name (tiny, small), a model directory, or a hub id that can be reached"

PASSED_ALONG = {"position_ids", "use_cache", "is_causal", "cache_position"}
"""Keywords that reach every attention function and that a packed one may ignore."""


def load_pretrained(
    name: str, *, dtype: torch.dtype, device: torch.device, gradient_checkpointing: bool = False
) -> tuple[Any, Tokenizer, str | None]:
    """Model, tokenizer, and why the model cannot pack (None: it can), from a directory or by hub id.

    Where the built-in decoder computes what the model does, it is that decoder (`adopt`). The model is in evaluation
    mode, with every dropout and router jitter of its configuration set to 0: what is trained is the distribution that
    was sampled. Raises NovaError for whatever is missing, unknown or unfit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    # The fast way to run a mixture of experts, one grouped product, knows no float64.
    options = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    with _explained(name, "no causal language model could be loaded", fix=NAMES):
        config = AutoConfig.from_pretrained(name)
        _silence(config)
        model, report = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, output_loading_info=True, **options
        )
    if report["missing_keys"]:
        raise NovaError(f"tensor '{sorted(report['missing_keys'])[0]}' is missing from the weights", where=name)
    model = model.to(device)
    with _explained(name, f"{type(model).__name__} cannot be run"):
        _check(model, name)
        decoder = adopt(model) if packing_obstacle(model.config) is None else None
        if decoder is not None and _distance(decoder, model) <= TOLERANCE:
            decoder.model.gradient_checkpointing = gradient_checkpointing
            model = decoder.eval()
    tokenizer = load_tokenizer(name)
    if len(tokenizer) > head(model)[0].size(0):  # type: ignore[arg-type]
        raise NovaError(
            f"the tokenizer has {len(tokenizer)} tokens, the model only {head(model)[0].size(0)}",  # type: ignore[arg-type]
            where=name,
            fix="resize the model's embeddings, or take the tokenizer that belongs to it",
        )
    if isinstance(model, Decoder):
        return model, tokenizer, None
    if type(embedding := model.get_input_embeddings()) is nn.Embedding:  # another kind may do more than look up
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
        model.train()  # transformers recomputes only in training mode; nothing else is left that depends on it
    return model, tokenizer, obstacle


def save_pretrained(model: Any, directory: str) -> None:
    """Writes a transformers model, or an adopted one as what it was: weights, config and generation config."""
    with _quiet():
        origin = model.origin if isinstance(model, Decoder) else None
        if origin is None:
            model.save_pretrained(directory)
        else:
            origin.config.save_pretrained(directory)
            origin.generation_config.save_pretrained(directory)
            model.save_weights(Path(directory))


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer by directory or hub id; a missing pad token is set to eos (masks come from lengths, never ids)."""
    from transformers import AutoTokenizer

    with _explained(name, "no tokenizer could be loaded", fix=NAMES):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise NovaError(
            "the tokenizer has no eos token, so nothing would end a completion",
            where=name,
            fix="set eos_token in tokenizer_config.json",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer  # type: ignore[no-any-return]


def packing_obstacle(config: Any) -> str | None:
    """What in a model's configuration the packed attention does not implement, or None."""
    text = config.get_text_config()
    layers = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention"})
    if layers:
        return f"layer_types={layers}"
    for name in ("sliding_window", "attention_chunk_size", "attn_logit_softcapping"):
        value = getattr(text, name, None)
        if value is not None:
            return f"{name}={value}"
    return None


def enable_packing(model: Any) -> str | None:
    """Gives `model` the packed attention where that changes nothing; otherwise leaves it as it is and says why."""
    obstacle = packing_obstacle(model.config)
    if obstacle is None and not (model._supports_attention_backend and model._supports_sdpa):
        obstacle = f"{type(model).__name__} does not take other attention functions"
    if obstacle is not None:
        return obstacle
    _register()
    own = model.config._attn_implementation
    model.set_attn_implementation(PACKING_ATTENTION)
    try:
        difference = _packing_error(model)
    except (NovaError, RuntimeError, ValueError, TypeError, IndexError) as error:
        obstacle = str(error)
    else:
        obstacle = None if difference <= TOLERANCE else f"packing changes its hidden states by {difference:.1g}"
    if obstacle is not None:
        model.set_attn_implementation(own)
    return obstacle


def packing_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_sequences: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention protocol: packed under `packed_sequences`, otherwise transformers' own SDPA.

    Raises NovaError naming whatever argument the packed attention does not implement (sliding window, soft cap, sinks,
    position bias, dropout, or one it has never heard of): swallowed, it would be a silently different model.
    """
    if packed_sequences is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise NovaError(f"{type(module).__name__} does not pass packed sequences on")
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    unknown = {name: value for name, value in kwargs.items() if name not in PASSED_ALONG} | {"dropout": dropout or None}
    refused = sorted(name for name, value in unknown.items() if value is not None and value is not False)
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        refused.append("is_causal=False")
    if refused:
        raise NovaError(
            f"packed attention does not implement {', '.join(refused)}, which {type(module).__name__} asks for",
            fix="use layout=padded",
        )
    return packed_attention(query, key, value, packed_sequences, scale=scaling).transpose(1, 2).contiguous(), None


def _register() -> None:
    """Makes `packing_sdpa` known to transformers, once, since it may have been replaced (`keep_attention_uncompiled`);
    its masks, where it needs one, are those of SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if PACKING_ATTENTION in AttentionInterface().valid_keys():
        return
    AttentionInterface.register(PACKING_ATTENTION, packing_sdpa)
    AttentionMaskInterface.register(PACKING_ATTENTION, sdpa_mask)


def keep_attention_uncompiled() -> None:
    """End the compiled graphs of a model's layers where attention begins. What it returns is a copy that always lies
    alike, since a graph is compiled again for every other layout."""
    from transformers import AttentionInterface

    def outside(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
        mixed, _ = packing_sdpa(*arguments, **options)
        return mixed.clone(memory_format=torch.contiguous_format), None

    AttentionInterface.register(PACKING_ATTENTION, torch.compiler.disable(outside))


def _silence(config: Any) -> None:
    """Sets every probability of dropout and every router jitter in `config` to 0."""
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, float) and any(noise in name for noise in ("dropout", "pdrop", "jitter")):
            setattr(text, name, 0.0)


def _probe_tokens(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Eight tokens in two sequences of five and three: tokens, position_ids, cu_seqlens."""
    weight = head(model)[0]
    tokens = torch.arange(8, device=weight.device) * 7 % weight.size(0)
    positions = torch.cat([torch.arange(5), torch.arange(3)]).to(weight.device)
    return tokens, positions, torch.tensor([0, 5, 8])


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, in units of the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


@torch.no_grad()
def _check(model: Any, name: str) -> None:
    """Raises NovaError where `model` is not causal or does more to its logits than the head."""
    text = model.config.get_text_config()
    for attribute, harmless in LOGIT_TRANSFORMS.items():
        value = getattr(text, attribute, None)
        if value not in harmless:
            raise NovaError(
                f"{model.config.model_type} changes its logits after the head ({attribute}={value}), "
                "so their log-probabilities cannot be computed in chunks",
                where=name,
            )
    if model.get_output_embeddings() is None:
        raise NovaError(f"{type(model).__name__} has no language-model head", where=name)
    tokens, positions, cu_seqlens = _probe_tokens(model)
    logits = model(input_ids=tokens[None, :5], use_cache=False).logits[0]
    shorter = model(input_ids=tokens[None, :4], use_cache=False).logits[0]
    if _relative(shorter, logits[:4]) > TOLERANCE:
        raise NovaError(f"{model.config.model_type} lets tokens see their future: no causal language model", where=name)
    weight, bias = head(model)
    ours = nn.functional.linear(hidden_states(model, tokens, positions, cu_seqlens, layout="padded")[:5], weight, bias)
    if _relative(ours, logits) > TOLERANCE:
        raise NovaError(
            f"the logits of {model.config.model_type} are not its last hidden states times its head "
            f"(they differ by {_relative(ours, logits):.1g}); look for a logit scale or cap in its configuration",
            where=name,
        )


@torch.no_grad()
def _distance(decoder: Decoder, model: Any) -> float:
    """How far the decoder's logits are from the model's on the probe, whose sequences it takes packed."""
    tokens, positions, cu_seqlens = _probe_tokens(model)
    weight, bias = head(decoder)
    ours = nn.functional.linear(hidden_states(decoder, tokens, positions, cu_seqlens), weight, bias)
    alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split([5, 3])]
    return _relative(ours, torch.cat(alone))


@torch.no_grad()
def _packing_error(model: nn.Module) -> float:
    """How much the two layouts differ on the probe."""
    tokens, positions, cu_seqlens = _probe_tokens(model)
    packed = hidden_states(model, tokens, positions, cu_seqlens, layout="packed")
    return _relative(packed, hidden_states(model, tokens, positions, cu_seqlens, layout="padded"))


@contextlib.contextmanager
def _explained(name: str, what: str, *, fix: str | None = None) -> Iterator[None]:
    """Turns what transformers raises for a missing or broken model into one NovaError, of one line."""
    from safetensors import SafetensorError

    try:
        with _quiet():
            yield
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NovaError(f"{what}: {reason}", where=name, fix=fix) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides transformers' progress bars, and the hub's line for each of its retries: what goes wrong is raised."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), hub_logging.get_verbosity()
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
