"""A user-defined model: any `nn.Module` that maps tokens and positions to logits.

    class MyModel(nn.Module):
        def forward(self, tokens, position_ids): ...    # int64 [B, T] each -> logits [B, T, V]

Position t must depend only on tokens 0 to t of its row: rows are right-padded without a mask. There is no KV cache, so
sampling recomputes the whole sequence for every token (`engines.local.recompute`), fit for small models and short
answers.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError

CONTEXT = ("context", "max_position_embeddings", "block_size", "n_ctx", "max_seq_len")
"""Attributes of a module or its `config` that give the maximum sequence length."""
USUAL_CONTEXT = 1024
"""The default."""
PROBE = 5


class PlainModel(nn.Module):
    """Adapts the module to the learner: its logits take the place of hidden states."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.vocabulary = self._probe()
        self.context = _context(module)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def logits(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]; the module may also return an object or dictionary with `logits`."""
        found = self.module(tokens, position_ids)
        found = found["logits"] if isinstance(found, dict) else getattr(found, "logits", found)
        if not isinstance(found, Tensor) or found.shape[:2] != tokens.shape or found.dim() != 3:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise NovaError(
                f"forward returned {shape} for tokens {list(tokens.shape)}",
                where=f"model {type(self.module).__name__}",
                fix="return logits [batch, time, vocabulary]",
            )
        return found

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.logits(input_ids, position_ids))

    def get_output_embeddings(self) -> nn.Module:
        """NovaError: how its logits are made only the module's `forward` knows."""
        what = f"{type(self.module).__name__} does not say which of its layers makes the logits, which adapters need"
        raise NovaError(what, where="model", fix="leave lora out, or give a transformers model")

    @torch.no_grad()
    def _probe(self) -> int:
        """The vocabulary size. Raises NovaError if the module cannot be called or is not causal."""
        where, fix = f"model {type(self.module).__name__}", "define forward(tokens, position_ids) -> logits [B, T, V]"
        if next(self.module.parameters(), None) is None:
            raise NovaError("the module has no parameters", where=where, fix="use a trainable module")
        tokens = torch.arange(PROBE, device=self.device)[None] % 2
        positions = torch.arange(PROBE, device=self.device)[None]
        training = self.module.training
        self.module.eval()
        try:
            whole, part = self.logits(tokens, positions), self.logits(tokens[:, :-1], positions[:, :-1])
        except (TypeError, IndexError, RuntimeError) as error:
            raise NovaError(f"forward raised {type(error).__name__}: {error}", where=where, fix=fix) from error
        finally:
            self.module.train(training)
        if not torch.allclose(whole[:, :-1], part, atol=1e-4, rtol=1e-4):
            what = "the logits of a token depend on later tokens, so this is not a causal language model"
            raise NovaError(what, where=where, fix="mask attention so that position t sees only positions 0 to t")
        return whole.size(-1)


def _context(module: nn.Module) -> int:
    for owner in (module, getattr(module, "config", None)):
        for name in CONTEXT:
            if isinstance(stated := getattr(owner, name, None), int):
                return stated
    return USUAL_CONTEXT
