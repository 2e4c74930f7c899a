"""A decoder-only transformer of the Qwen3 architecture, in plain PyTorch.

RMSNorm before attention and MLP, rotary positions, grouped-query attention with normalised queries and keys, SwiGLU,
tied or untied head (https://arxiv.org/abs/2505.09388). Parameter names and `config.json` follow Hugging Face, so a
saved directory loads with `AutoModelForCausalLM`. Nothing here imports transformers, which takes seconds.

The call convention is that of Hugging Face backbones:

    model(input_ids[B, L], position_ids=[B, L], attention_mask=None | bool [B, 1, L, K], past_key_values=None | cache)
        .last_hidden_state   # [B, L, D], after the final norm; logits are `last_hidden_state @ lm_head.weight.T`

A cache is any object with `update(key[B, Hkv, L, Dh], value, layer_idx) -> (keys[B, Hkv, K, Dh], values)`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from novarl.core.errors import NovaError
from novarl.core.seeds import derive
from novarl.kernels.accumulation import look_up
from novarl.kernels.attention import causal_attention, masked_attention, packed_attention
from novarl.kernels.fused import Linear, rms_norm, rotate, swiglu
from novarl.kernels.packing import Kernel, Packing
from novarl.models.files import WHOLE, check_numbers, read_tensors


class Cache(Protocol):
    """The KV cache: the part of the Hugging Face cache protocol that a decoder needs."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]: ...


class Origin(Protocol):
    """The configurations of a transformers model, which can save themselves to a directory."""

    @property
    def config(self) -> Any: ...
    @property
    def generation_config(self) -> Any: ...


class DecoderOutput(NamedTuple):
    """The result of a forward pass, with the Hugging Face name: the hidden states [B, L, D] after the final norm."""

    last_hidden_state: Tensor


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The configuration of a decoder, with the names of the Qwen3 `config.json`. The last fields describe how other
    families differ (`models.adopt`) and are never saved."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 4096
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    qk_norm: bool = True
    qkv_bias: bool = False
    rope_frequencies: tuple[float, ...] | None = None
    """Rotary frequencies in radians per position for each pair of a head; None: those of `rope_theta`."""

    def to_dict(self) -> dict[str, Any]:
        """The contents of `config.json`; `rope_theta` is written in both the old and the new place."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        fixed = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "float32", "bos_token_id": None}
        plain = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False}
        mine = {name: value for name, value in asdict(self).items() if name not in _OTHERS}
        return {**fixed, **mine, **plain, "rope_parameters": rope}

    @staticmethod
    def unsupported(values: Mapping[str, Any]) -> list[str]:
        """The keys of a `config.json` that request something this decoder does not implement."""
        rope, layers = values.get("rope_parameters") or {}, values.get("layer_types") or []
        wrong = {
            "model_type": values.get("model_type") != "qwen3",
            "hidden_act": values.get("hidden_act", "silu") != "silu",
            "attention_bias": bool(values.get("attention_bias")),
            "attention_dropout": bool(values.get("attention_dropout")),
            "use_sliding_window": bool(values.get("use_sliding_window")),
            "layer_types": not isinstance(layers, list) or any(kind != "full_attention" for kind in layers),
            "rope_parameters": not isinstance(rope, dict) or rope.get("rope_type", "default") != "default",
            "rope_scaling": bool(values.get("rope_scaling")),
        }
        return [name for name, is_wrong in wrong.items() if is_wrong]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "config.json") -> DecoderConfig:
        """Parse the contents of a `config.json`. Raises NovaError naming what this decoder does not implement."""
        names = cls.unsupported(values)
        if names:
            raise NovaError(f"the built-in decoder does not implement {', '.join(names)}", where=where)
        rope = values.get("rope_parameters") or {}
        given = {**values, "rope_theta": rope.get("rope_theta", values.get("rope_theta", 10_000.0))}
        known: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in _OTHERS or (field.name not in given and field.default is not MISSING):
                continue
            value, (kind, least, wanted) = given.get(field.name), _KINDS[str(field.type)]
            if not isinstance(value, kind) or (least is not None and not least <= value < math.inf):
                found = f"is {value!r}" if field.name in given else "is missing"
                raise NovaError(f"{field.name} {found}", where=where, fix=f"it must be {wanted}: {WHOLE}")
            known[field.name] = value
        return cls(**{**known, "rope_theta": float(given["rope_theta"])})


_OTHERS = {"qk_norm", "qkv_bias", "rope_frequencies"}

_KINDS: dict[str, tuple[Any, int | None, str]] = {
    "int": (int, 1, "a positive integer"),
    "float": ((int, float), 0, "a number of at least 0"),
    "bool": (bool, None, "true or false"),
    "int | None": ((int, type(None)), None, "a token id"),
}
"""For each field type: Python types, minimum, and description."""


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), in the dtype of the weight (float32 also under bfloat16 autocast)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.to(self.weight.dtype), self.weight, self.eps)


def rotary_angles(position_ids: Tensor, config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, L, head_dim / 2] of position * theta^(-2i / head_dim), or of the configured frequencies,
    always computed in float32."""
    options: dict[str, Any] = {"dtype": torch.float32, "device": position_ids.device}
    if config.rope_frequencies is None:
        frequency = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, **options) / config.head_dim)
    else:
        frequency = torch.tensor(config.rope_frequencies, **options)
    angle = position_ids[:, None, :, None].to(torch.float32) * frequency
    return angle.cos(), angle.sin()


class Embedding(nn.Embedding):
    """An embedding that does not initialise its weight, as `Linear`, and whose gradient can be accumulated in place."""

    def reset_parameters(self) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        return look_up(self.weight, input, self.padding_idx)


class Attention(nn.Module):
    """Grouped-query self-attention, with normalised queries and keys if configured."""

    attend_packed = staticmethod(packed_attention)

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        hidden, size = config.hidden_size, config.head_dim
        self.q_proj = Linear(hidden, config.num_attention_heads * size, bias=config.qkv_bias)
        self.k_proj = Linear(hidden, config.num_key_value_heads * size, bias=config.qkv_bias)
        self.v_proj = Linear(hidden, config.num_key_value_heads * size, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_attention_heads * size, hidden)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        mask: Tensor | None,
        cache: Cache | None,
        packed: Packing | None,
        keep: Tensor | None = None,
    ) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        query = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        key = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if packed is not None:
            mixed = self.attend_packed(query, key, value, packed, last=keep is not None)
        elif mask is not None:
            mixed = masked_attention(query, key, value, mask)
        else:
            mixed = causal_attention(query, key, value)
        return self.o_proj(_kept(mixed.transpose(1, 2), keep).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(self.gate_proj(x), self.up_proj(x), self.down_proj)


class Layer(nn.Module):
    """A residual block: attention, then the MLP, each with pre-norm."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *, keep: Tensor | None = None, **context: Any) -> Tensor:
        """x [B, L, D] to the same shape, or to [B, K, D] if only the positions `keep` [K] are needed. `context` is what
        the attention reads."""
        mixed = self.self_attn(self.input_layernorm(x), cos, sin, keep=keep, **context)
        x = _kept(x, keep) + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


def _kept(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else x.index_select(1, keep)


class Backbone(nn.Module):
    """Embedding, layers and final norm: everything but the head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, position_ids: Tensor, *, keep: Tensor | None, **context: Any) -> Tensor:
        x = self.embed_tokens(input_ids)
        cos, sin = rotary_angles(position_ids, self.config)
        for number, layer in enumerate(self.layers, 1):
            if keep is not None and number == len(self.layers):
                context["keep"] = keep
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, use_reentrant=False, **context)
            else:
                x = layer(x, cos, sin, **context)
        return self.norm(x)


class Decoder(nn.Module):
    """The language model: `model` (the backbone) and `lm_head`, tied to the embedding or separate. Weights are drawn
    from N(0, initializer_range) with a generator of their own, so equal seeds give equal weights. With seed None they
    are uninitialised, for callers that load them."""

    packed_kernel: Kernel = "sdpa"
    """The kernel for packed attention."""

    origin: Origin | None = None
    """The original configurations, if the weights come from a transformers model."""

    def __init__(self, config: DecoderConfig, *, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        if seed is None:
            return
        generator = torch.Generator().manual_seed(derive(seed, "weights"))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.initializer_range, generator=generator)

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        packed_sequences: Packing | None = None,
        keep: Tensor | None = None,
    ) -> DecoderOutput:
        """Hidden states of `input_ids` [B, L]; see the module's docstring.

        `attention_mask` bool [B, 1, L, K] is True where a query may attend; by default attention is causal.
        `packed_sequences` describes the sequences on the flat axis of B = 1: each attends only to itself. `keep` int64
        [K]: the positions that are needed, [B, K, D], for which alone the last layer computes its output. `use_cache`
        is accepted for compatibility: keys are cached exactly if `past_key_values` is given.
        """
        if use_cache and past_key_values is None:
            raise ValueError("use_cache=True requires past_key_values")
        seen = {"mask": attention_mask, "cache": past_key_values, "packed": packed_sequences}
        return DecoderOutput(self.model(input_ids, position_ids, keep=keep, **seen))

    def get_output_embeddings(self) -> nn.Linear:
        """The head, under its Hugging Face name."""
        return self.lm_head

    def save_weights(self, directory: Path) -> None:
        """Write `model.safetensors`; a tied head is omitted, as in Hugging Face."""
        from safetensors.torch import save_file

        tensors = {name: p.detach().to("cpu").contiguous() for name, p in self.named_parameters()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    def save(self, directory: str | Path) -> None:
        """Write `config.json` and `model.safetensors`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.save_weights(directory)
        text = json.dumps(self.config.to_dict(), indent=2, sort_keys=True)
        (directory / "config.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: str | Path) -> Decoder:
        """Read what `save` wrote. Raises NovaError if the weights do not match the configuration."""
        directory = Path(directory)
        where = str(directory / "config.json")
        values = json.loads((directory / "config.json").read_text("utf-8"))
        check_numbers(values, where, WHOLE)
        config = DecoderConfig.from_dict(values, where=where)
        tensors = read_tensors(directory / "model.safetensors", "the weights")
        try:
            with torch.device("meta"):  # detect mismatches before allocating memory
                ours = dict(cls(config, seed=None).named_parameters())
        except (RuntimeError, TypeError) as error:
            what = f"no model can be built from it: {str(error).splitlines()[0]}"
            raise NovaError(what, where=where, fix=WHOLE) from error
        wrong = sorted(ours.keys() ^ tensors.keys()) or [n for n, p in ours.items() if p.shape != tensors[n].shape]
        if wrong:
            file = str(directory / "model.safetensors")
            raise NovaError(f"tensor '{wrong[0]}' does not match config.json", where=file, fix=WHOLE)
        with torch.no_grad():
            model = cls(config, seed=None)
            for name, parameter in model.named_parameters():
                parameter.copy_(tensors[name])
        return model
