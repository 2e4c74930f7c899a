"""Where a number that is not finite comes from: a weight, an input, a layer, or the backward pass.

Runs only after a gradient was not finite, so it may take its time: one forward pass per sample, with hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from novarl.core.types import Batch
from novarl.learn.plan import piece, trajectory_of_tokens
from novarl.learn.scorer import Scorer


@torch.no_grad()
def find_origin(
    scorer: Scorer, batch: Batch, columns: Mapping[str, Tensor | None], gradients: Mapping[str, Tensor]
) -> str:
    """The first place, in the order of the computation, that holds a NaN or an infinity: a phrase for a message.

    `columns` are the per-token inputs of the loss [N] by name, `gradients` those of the weights by name. Samples are
    numbered from 0 in the order of the batch, tokens from 0 in their sequence.
    """
    model = scorer.model
    broken = next((name for name, weight in model.named_parameters() if not _finite(weight)), None)
    if broken is not None:
        return f"the weight {broken} is not finite, since an earlier update"
    for name, column in columns.items():
        if column is not None and (wrong := (~torch.isfinite(column) & batch.mask).nonzero().flatten()).numel():
            token = int(wrong[0])
            sample = int(trajectory_of_tokens(batch)[token])
            return f"{name} is {column[token].item()} in sample {sample}, token {int(batch.position_ids[token])}"
    for sample in range(batch.reward.numel()):
        found = _in_forward(scorer, batch, sample)
        if found is not None:
            return found
    wrong_names = [name for name, gradient in gradients.items() if not _finite(gradient)]
    if not wrong_names:
        return "no weight, input, layer or gradient is not finite on its own: their sum overflows"
    count = f" and {len(wrong_names) - 1} others" if len(wrong_names) > 1 else ""
    return f"the forward pass is finite; it arises in the backward pass, at the gradient of {wrong_names[-1]}{count}"


def _in_forward(scorer: Scorer, batch: Batch, sample: int) -> str | None:
    """The first layer whose output is not finite for a sample, with the token; None if there is none."""
    part, _ = piece(batch, [sample], scorer.device)
    if not part.mask.any():
        return None
    seen: list[str] = []

    def look(name: str, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if seen or not isinstance(first, Tensor) or not first.is_floating_point() or _finite(first):
            return
        seen_token = _token(part, first)
        token = "" if seen_token is None else f", token {seen_token}"
        seen.append(f"the output of layer {name} in sample {sample}{token}")

    modules = [(name, module) for name, module in scorer.model.named_modules() if name]
    handles = [module.register_forward_hook(_hook(name, look)) for name, module in modules]
    try:
        logp, _ = scorer(part)
    finally:
        for handle in handles:
            handle.remove()
    if seen:
        return seen[0]
    if not _finite(logp):
        token = int((~torch.isfinite(logp)).nonzero()[0])
        return f"the log-probability in sample {sample}, token {int(part.position_ids[token])}"
    return None


def _token(part: Batch, output: Tensor) -> int | None:
    """The first token of the sequence at which a layer's output is not finite; None if the layer does not tell."""
    if output.dim() < 2:
        return None
    axis = 1 if output.dim() > 2 and output.shape[0] == 1 else 0
    wrong = int((~torch.isfinite(output)).nonzero()[:, axis].min())
    if output.shape[axis] >= part.tokens.numel():  # padded on the right
        return wrong if wrong < part.tokens.numel() else None
    # The last layers compute only the places that predict a trained token.
    places = part.position_ids[part.prev[part.mask]]
    return int(places[wrong]) if output.shape[axis] == places.numel() else None


def _hook(name: str, look: Callable[[str, object], None]) -> Callable[[nn.Module, object, object], None]:
    return lambda module, inputs, output: look(name, output)


def _finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
