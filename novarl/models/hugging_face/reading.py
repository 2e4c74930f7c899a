"""Reads the model that a config.json describes, with exactly the weights beside it."""

from __future__ import annotations

import re
from typing import Any

import torch

from novarl.core.errors import NovaError
from novarl.models.files import WHOLE, check_numbers
from novarl.models.hugging_face.failures import MEND, NAMES, UNREADABLE, asks_for_code, explained, reason_of
from novarl.models.trust import Trust, check_weights

MOST_NUMBERS = 2**30
"""Per buffer: the size of a causal mask of 32,768 positions. Buffers of rotary embeddings are far smaller."""

BESIDE = re.compile(
    r"(^|\.)(inv_freq|cos_cached|sin_cached|masked_bias|causal_mask|attn\.bias|attention\.bias|position_ids)$"
    r"|(^|\.)(mtp|pooler\.)"
)
"""Names of tensors in a checkpoint that may be ignored: buffers that older versions of transformers saved and newer
ones compute, and heads for other tasks than next-token prediction."""


def read_model(name: str, dtype: torch.dtype, trust: Trust) -> Any:
    """The model described by the config.json in `name`, with exactly the weights in that directory."""
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

    # The fast mixture-of-experts kernel, one grouped product, does not support float64.
    options: dict[str, Any] = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    code = {"trust_remote_code": trust.runs_code(name)}
    options |= {**code, "use_safetensors": None if trust.reads_pickles(name) else True}
    with explained(name, UNREADABLE, fix=NAMES):
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
            if asks_for_code(error):
                raise
            _check_configuration(name, error)
            if "ignore_mismatched_sizes" not in str(error):
                stacked = "weights to be stacked, such as those of experts, are missing or have different shapes"
                reason = stacked if "CONVERSION" in str(error) else reason_of(error)
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
    reason = reason_of(error)
    if not any(field in reason for field in values):
        others = ({key: value for key, value in values.items() if key != field} for field in values)
        wrong = next((field for field, rest in zip(values, others, strict=True) if _can_be_made(rest)), None)
        reason = reason if wrong is None else f"{wrong} is {values[wrong]!r:.80}: {reason}"
    raise NovaError(f"{UNREADABLE}: {reason}", where=f"{name}/config.json", fix=MEND) from error


def _check_buffers(config: Any, name: str, code: dict[str, bool]) -> None:
    """Raise NovaError for huge buffers. Parameters are compared with the weights before they take memory."""
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


def _silence(config: Any) -> None:
    """Set every dropout probability and router jitter in `config` to 0."""
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, float) and any(noise in name for noise in ("dropout", "pdrop", "jitter")):
            setattr(text, name, 0.0)
