"""Load models and tokenizers with Hugging Face transformers, add packed attention, and verify the models.

The only module that imports transformers (`rendering` runs in its own process), and only inside functions, because the
import takes seconds. After loading, a probe of eight tokens verifies the assumptions about a model: it is causal, its
logits are hidden @ head.T (+ bias), and packing does not change the result.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from novarl.core.errors import NovaError
from novarl.kernels.attention import PACKING_ATTENTION, packed_attention
from novarl.kernels.fused import FullLinear
from novarl.kernels.packing import Packing
from novarl.models.adopt import adopt
from novarl.models.forward import head, hidden_states
from novarl.models.numbers import check_numbers
from novarl.models.transformer import WHOLE, Decoder, Embedding
from novarl.models.trust import NOTHING, Trust, check_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from novarl.core.types import Tokenizer

TOLERANCE = 1e-4
"""Largest relative difference that the probes accept as rounding (measured: about 1e-6)."""

LOGIT_TRANSFORMS = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
}
"""Configuration attributes that change logits after the head, with the values under which they do not."""

NAMES = "use a built-in name (tiny, small), a model directory, or a Hub id that can be reached"

UNREADABLE = "no causal language model could be loaded"

MEND = f"fix config.json, or {WHOLE}"

MOST_NUMBERS = 2**30
"""Per buffer: the size of a causal mask of 32,768 positions. Buffers of rotary embeddings are far smaller."""

BESIDE = re.compile(
    r"(^|\.)(inv_freq|cos_cached|sin_cached|masked_bias|causal_mask|attn\.bias|attention\.bias|position_ids)$"
    r"|(^|\.)(mtp|pooler\.)"
)
"""Names of tensors in a checkpoint that may be ignored: buffers that older versions of transformers saved and newer
ones compute, and heads for other tasks than next-token prediction."""

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")

COPY_TOKENIZER = "copy tokenizer.json and tokenizer_config.json from the original model"

PASSED_ALONG = {"position_ids", "use_cache", "is_causal", "cache_position"}
"""Keywords that every attention function receives and that packed attention may ignore."""


def load_pretrained(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    gradient_checkpointing: bool = False,
    trust: Trust = NOTHING,
) -> tuple[Any, Tokenizer, str | None]:
    """Model, tokenizer, and why the model does not support packing (None: it does), from a directory or Hub id.

    Code in the model directory is run, and pickle files are read, only if `trust` allows it.

    If the built-in decoder computes the same function, it is used instead (`adopt`). The model is in evaluation mode,
    with all dropout and router jitter set to 0, so that the trained distribution is the sampled one. Raises NovaError
    if anything is missing, unknown or unsupported.
    """
    model = _read_model(name, dtype, trust).to(device)
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
    with _explained(name, f"{type(model).__name__} cannot be run", fix=MEND):
        _check(model, name)
        decoder = adopt(model) if packing_obstacle(model.config) is None else None
        if decoder is not None and _distance(decoder, model) <= TOLERANCE:
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
    """Save a transformers model (an adopted one in its original form): weights, config, and generation config with all
    eos ids."""
    with _quiet():
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
    with _explained(name, "no tokenizer could be loaded", fix=COPY_TOKENIZER if directory.is_dir() else NAMES):
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


def packing_obstacle(config: Any) -> str | None:
    """The configuration setting that packed attention does not support, or None."""
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
    """Enable packed attention in `model` if results are the same; otherwise leave it unchanged and return why."""
    obstacle = packing_obstacle(model.config)
    if obstacle is None and not (model._supports_attention_backend and model._supports_sdpa):
        obstacle = f"{type(model).__name__} does not support custom attention functions"
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
        obstacle = None if difference <= TOLERANCE else f"packing changes the hidden states by {difference:.1g}"
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
    """An attention function for transformers: packed if `packed_sequences` is given, otherwise SDPA.

    Raises NovaError for any argument that packed attention does not implement (sliding window, soft cap, sinks,
    position bias, dropout, or an unknown one), because ignoring it would silently change the model.
    """
    if packed_sequences is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise NovaError(f"{type(module).__name__} does not pass packed_sequences to its attention")
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
            f"packed attention does not implement {', '.join(refused)}, which {type(module).__name__} uses",
            fix="use layout=padded",
        )
    return packed_attention(query, key, value, packed_sequences, scale=scaling).transpose(1, 2).contiguous(), None


def _read_model(name: str, dtype: torch.dtype, trust: Trust) -> Any:
    """The model described by the config.json in `name`, with exactly the weights in that directory."""
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

    # The fast mixture-of-experts kernel, one grouped product, does not support float64.
    options: dict[str, Any] = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    code = {"trust_remote_code": trust.runs_code(name)}
    options |= {**code, "use_safetensors": None if trust.reads_pickles(name) else True}
    with _explained(name, UNREADABLE, fix=NAMES):
        try:
            values: dict[str, Any] = PretrainedConfig.get_config_dict(name)[0]
            check_numbers(values, f"{name}/config.json", MEND)
            config = AutoConfig.from_pretrained(name, **code)
            check_weights(name, trust)
            _check_buffers(config, name, code)
            _silence(config)
            options |= {"config": config, "dtype": dtype, "output_loading_info": True}
            model, report = AutoModelForCausalLM.from_pretrained(name, **options)
        except (NovaError, OSError):  # there is none, or it cannot be reached
            raise
        except Exception as error:
            if _asks_for_code(error):
                raise
            _check_configuration(name, error)
            if "ignore_mismatched_sizes" not in str(error):
                stacked = "weights to be stacked, such as those of experts, are missing or have different shapes"
                reason = stacked if "CONVERSION" in str(error) else _reason(error)
                raise NovaError(f"{UNREADABLE}: {reason}", where=name, fix=WHOLE) from error
            # Transformers only prints which tensors have another shape, so build the model again without memory.
            options |= {"device_map": "meta", "ignore_mismatched_sizes": True}
            model, report = AutoModelForCausalLM.from_pretrained(name, **options)
        _check_tensors(model, report, name)
    return model


def _check_configuration(name: str, error: Exception) -> None:
    """Raise NovaError with the message of `error` if the config.json in `name` is invalid. The faulty field is found by
    removing fields one at a time."""
    from transformers import PretrainedConfig

    values: dict[str, Any] = PretrainedConfig.get_config_dict(name)[0]
    if _can_be_made(values):
        return
    reason = _reason(error)
    if not any(field in reason for field in values):
        others = ({key: value for key, value in values.items() if key != field} for field in values)
        wrong = next((field for field, rest in zip(values, others, strict=True) if _can_be_made(rest)), None)
        reason = reason if wrong is None else f"{wrong} is {values[wrong]!r:.80}: {reason}"
    raise NovaError(f"{UNREADABLE}: {reason}", where=f"{name}/config.json", fix=MEND) from error


def _check_buffers(config: Any, name: str, code: dict[str, bool]) -> None:
    """Raise NovaError if a model of this configuration would allocate huge buffers. Its parameters are compared with
    the weights before they take memory."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config, **code)
    except Exception:  # noqa: BLE001 - it will be raised again, and explained
        return
    for buffer, table in model.named_buffers():
        if table.numel() > MOST_NUMBERS:
            what = f"{UNREADABLE}: its buffer '{buffer}' would have {table.numel():,} elements"
            raise NovaError(what, where=f"{name}/config.json", fix=MEND)


def _can_be_made(values: dict[str, Any]) -> bool:
    """Whether a causal language model can be built from this configuration, without allocating its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    except Exception:  # noqa: BLE001 - each field has its own checks, in code of many authors
        return False
    return True


def _check_tensors(model: Any, report: dict[str, Any], name: str) -> None:
    """Raise NovaError if the weights in `name` do not match `model`: transformers would initialise missing tensors
    randomly and ignore unexpected ones."""
    stated = str((model.config.architectures or [""])[0])
    whose = "" if not stated or stated.endswith(("LM", "LMHeadModel")) else f"{stated} is not a causal language model: "
    if report["missing_keys"]:
        what = f"tensor '{min(report['missing_keys'])}' is missing from the weights"
        raise NovaError(f"{whose}{what}", where=name, fix=MEND)
    if report["mismatched_keys"]:
        tensor, found, wanted = min(report["mismatched_keys"])
        what = f"tensor '{tensor}' is {_shape(found)} in the weights, but {_shape(wanted)} according to config.json"
        raise NovaError(f"{whose}{what}", where=name, fix=MEND)
    if over := sorted(tensor for tensor in report["unexpected_keys"] if _is_own(tensor, model)):
        what = f"tensor '{over[0]}' in the weights does not exist in the model described by config.json"
        raise NovaError(f"{whose}{what}", where=name, fix=MEND)


def _shape(size: torch.Size) -> str:
    return " by ".join(map(str, size))


def _is_own(tensor: str, model: Any) -> bool:
    """Whether a tensor with this name is needed to predict the next token, and not a head for another task."""
    parts = {part for module in (model, model.base_model) for part, _ in module.named_children()}
    if tensor.partition(".")[0] not in parts or BESIDE.search(tensor):
        return False
    text = model.config.get_text_config()
    last, layer = getattr(text, "num_hidden_layers", 0), re.search(r"\blayers\.(\d+)\.", tensor)
    further = getattr(text, "num_nextn_predict_layers", None) or 0  # extra layers for multi-token prediction
    return layer is None or int(layer[1]) not in range(last, last + further)


def _register() -> None:
    """Register `packing_sdpa` in transformers, once, because it may have been replaced (`keep_attention_uncompiled`).
    It uses the masks of SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if PACKING_ATTENTION in AttentionInterface().valid_keys():
        return
    AttentionInterface.register(PACKING_ATTENTION, packing_sdpa)
    AttentionMaskInterface.register(PACKING_ATTENTION, sdpa_mask)


def keep_attention_uncompiled() -> None:
    """End the compiled graphs of a model's layers before attention. The result is copied to a fixed memory layout,
    because every other layout would trigger a recompilation."""
    from transformers import AttentionInterface

    def outside(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
        mixed, _ = packing_sdpa(*arguments, **options)
        return mixed.clone(memory_format=torch.contiguous_format), None

    AttentionInterface.register(PACKING_ATTENTION, torch.compiler.disable(outside))


def _silence(config: Any) -> None:
    """Set every dropout probability and router jitter in `config` to 0."""
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
    """The largest difference relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


@torch.no_grad()
def _check(model: Any, name: str) -> None:
    """Raise NovaError if `model` is not causal or transforms its logits after the head."""
    text = model.config.get_text_config()
    for attribute, harmless in LOGIT_TRANSFORMS.items():
        value = getattr(text, attribute, None)
        if value not in harmless:
            raise NovaError(
                f"{model.config.model_type} transforms its logits after the head ({attribute}={value}), "
                "so their log-probabilities cannot be computed in chunks",
                where=name,
            )
    if model.get_output_embeddings() is None:
        raise NovaError(f"{type(model).__name__} has no language-model head", where=name, fix=NAMES)
    tokens, positions, cu_seqlens = _probe_tokens(model)
    logits = model(input_ids=tokens[None, :5], use_cache=False).logits[0]
    if not bool(logits.isfinite().all()):
        what = "the model's logits are not finite: a weight or a configuration value is corrupt"
        raise NovaError(what, where=name, fix=MEND)
    shorter = model(input_ids=tokens[None, :4], use_cache=False).logits[0]
    if _relative(shorter, logits[:4]) > TOLERANCE:
        what = f"{model.config.model_type} is not a causal language model: tokens depend on later tokens"
        raise NovaError(what, where=name, fix=NAMES)
    weight, bias = head(model)
    ours = nn.functional.linear(hidden_states(model, tokens, positions, cu_seqlens, layout="padded")[:5], weight, bias)
    if _relative(ours, logits) > TOLERANCE:
        raise NovaError(
            f"the logits of {model.config.model_type} are not the product of its last hidden states and its head "
            f"(they differ by {_relative(ours, logits):.1g}); check its configuration for a logit scale or cap",
            where=name,
        )


@torch.no_grad()
def _distance(decoder: Decoder, model: Any) -> float:
    """The difference between the logits of the decoder (packed) and of the model on the probe."""
    tokens, positions, cu_seqlens = _probe_tokens(model)
    weight, bias = head(decoder)
    ours = nn.functional.linear(hidden_states(decoder, tokens, positions, cu_seqlens), weight, bias)
    alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split([5, 3])]
    return _relative(ours, torch.cat(alone))


@torch.no_grad()
def _packing_error(model: nn.Module) -> float:
    """The difference between the two layouts on the probe."""
    tokens, positions, cu_seqlens = _probe_tokens(model)
    packed = hidden_states(model, tokens, positions, cu_seqlens, layout="packed")
    return _relative(packed, hidden_states(model, tokens, positions, cu_seqlens, layout="padded"))


@contextlib.contextmanager
def _explained(name: str, what: str, *, fix: str | None = None) -> Iterator[None]:
    """Turn any exception of transformers for a missing or broken model into a one-line NovaError."""
    try:
        with _quiet():
            yield
    except NovaError:
        raise
    except Exception as error:
        if _asks_for_code(error):
            what = "the model contains custom Python code, which is not run by default"
            fix = f"review the code, and if you trust it, set trust_remote_code={name}"
            raise NovaError(what, where=name, fix=fix) from error
        raise NovaError(f"{what}: {_reason(error)}", where=name, fix=fix) from error


def _asks_for_code(error: Exception) -> bool:
    return "trust_remote_code" in str(error)


def _reason(error: BaseException) -> str:
    """The core message of `error`, on one line."""
    from huggingface_hub.errors import StrictDataclassError

    while isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    if isinstance(error, UnpicklingError) or "weights_only" in text:  # torch's message says how to run it
        return "a pickle file contains something other than tensors or is damaged, so it is not read"
    if isinstance(error, KeyError):
        text = str(error.args[0])
        text = text if " " in text else f"{text!r} is missing"
    first, *others = (text or type(error).__name__).splitlines()
    if first.endswith(":") and others:
        first = f"{first} {others[0].strip()}"
    return first.partition(" Errors: ")[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide progress bars, tables and retry messages of transformers and the Hub client. Errors are raised."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    shown, verbosities = logging.is_progress_bar_enabled(), (logging.get_verbosity(), hub_logging.get_verbosity())
    logging.disable_progress_bar()
    for library in (logging, hub_logging):
        library.set_verbosity_error()
    try:
        yield
    finally:
        for library, verbosity in zip((logging, hub_logging), verbosities, strict=True):
            library.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
