"""A model of the user's own: any `nn.Module` that maps tokens and positions to logits.

    class MyModel(nn.Module):
        def forward(self, tokens, position_ids): ...    # int64 [B, T] each -> logits [B, T, V]

Position t must depend on tokens 0 to t of its row alone: rows are padded on the right, and what is padding is not
masked. There is no cache of keys and values, so sampling runs the whole sequence for every token
(`engines.local.recompute`): right for small models and short answers.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError

CONTEXT = ("context", "max_position_embeddings", "block_size", "n_ctx", "max_seq_len")
"""What a module, or its `config`, may call the longest sequence that it takes."""
USUAL_CONTEXT = 1024
"""Where it says nothing."""
PROBE = 5


class PlainModel(nn.Module):
    """The module as the learner sees it: its "hidden states" are its logits already."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.vocabulary = self._probe()
        self.context = _context(module)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def logits(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]; a dataclass or dictionary with `logits` is taken too."""
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
        """The size of the vocabulary. NovaError where the module cannot be called, or looks into the future."""
        where, fix = f"model {type(self.module).__name__}", "write forward(tokens, position_ids) -> logits [B, T, V]"
        if next(self.module.parameters(), None) is None:
            raise NovaError("the module has no parameters", where=where, fix="give a module that can be trained")
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
            what = "the logits of a token change with the tokens after it, so this is no causal language model"
            raise NovaError(what, where=where, fix="mask attention, so that position t sees positions 0 to t")
        return whole.size(-1)


def _context(module: nn.Module) -> int:
    for owner in (module, getattr(module, "config", None)):
        for name in CONTEXT:
            if isinstance(stated := getattr(owner, name, None), int):
                return stated
    return USUAL_CONTEXT
