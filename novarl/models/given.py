"""Make a policy from a model object and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from novarl.core.errors import NovaError
from novarl.core.types import Tokenizer
from novarl.kernels.attention import choose_kernel
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.forward import vocabulary_of
from novarl.models.load import COMPUTE_DTYPES, Policy, pretrained_policy
from novarl.models.lora import plain_parameters
from novarl.models.plain import PlainModel
from novarl.models.transformer import Decoder


def policy_of(
    model: nn.Module,
    tokenizer: Tokenizer | None,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    attn: str = "auto",
) -> Policy:
    """The policy that trains `model` in place: a transformers model as if it were loaded, a built-in one, or any other
    module by its own `forward` (`models.plain`). Without a `tokenizer`, tokens are those of `ByteTokenizer`, for the
    built-in models and modules with 262 tokens or more. NovaError if it is not a causal language model."""
    device, name = torch.device(device), type(model).__name__
    compute_dtype = COMPUTE_DTYPES[dtype]
    model.to(device=device, dtype=torch.float64 if compute_dtype is torch.float64 else torch.float32)
    if isinstance(model, Decoder):
        model.model.gradient_checkpointing = gradient_checkpointing
        model.packed_kernel = choose_kernel(attn, device, compute_dtype, head_size=model.config.head_dim)
        own = tokenizer or ByteTokenizer()
        ends, context = (own.eos_token_id,), model.config.max_position_embeddings
        return _checked(Policy(model.eval(), own, name, ends, context, compute_dtype))
    if hasattr(model, "config") and hasattr(model, "get_output_embeddings"):
        if tokenizer is None:
            what = f"{name} was given without a tokenizer"
            raise NovaError(what, where="tokenizer", fix="pass tokenizer=AutoTokenizer.from_pretrained(...)")
        from novarl.models.hugging_face.pretrained import settle_tokenizer, to_learn_from

        ready, obstacle = to_learn_from(model, name, gradient_checkpointing=gradient_checkpointing)
        settle_tokenizer(tokenizer, name)
        policy = pretrained_policy(
            ready, tokenizer, obstacle, name, compute_dtype=compute_dtype, device=device, attn=attn
        )
        return _checked(policy)
    plain = PlainModel(model.eval())
    own = tokenizer or ByteTokenizer()
    return _checked(Policy(plain, own, name, (own.eos_token_id,), plain.context, compute_dtype))


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the weights of `source` (a checkpoint) to `target` (the user's object), of the same architecture."""
    stored = dict(plain_parameters(source))
    with torch.no_grad():
        for name, parameter in plain_parameters(target):
            parameter.copy_(stored[name])


def read_weights(model: PlainModel, folder: Path) -> None:
    """Read the weights that `load.save` wrote for a plain module. Raises NovaError if they do not match the module."""
    from safetensors.torch import load_file

    try:
        model.module.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise NovaError(f"the weights cannot be loaded: {first}", where=str(folder)) from error


def _checked(policy: Policy) -> Policy:
    tokens, known = len(policy.tokenizer), vocabulary_of(policy.model)  # type: ignore[arg-type]
    if tokens > known:
        what = f"the tokenizer has {tokens} tokens, but the model only {known}"
        raise NovaError(what, where="tokenizer", fix="use the model's own tokenizer")
    return policy
