"""Check that sampler and learner have the same distribution before the first update: ratio 1 and KL 0, within rounding.
Otherwise the first gradient would be that of a different policy, so the run is stopped, with the likely cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.core.types import Batch, Prompt, Record, Rollout


def disagreement(what: str, where: str = "step 0") -> NovaError:
    fix = "training would use the wrong distribution, so the run was stopped"
    return NovaError(f"sampler and learner disagree: {what}", where=where, fix=fix)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Tolerated |log pi_sampler - log pi_learner| in nats per token: the mean, and at the given quantile."""

    mean: float
    extreme: float
    quantile: float


TOLERANCES = {
    torch.float64: Tolerance(1e-5, 1e-3, 1.0),
    torch.float32: Tolerance(1e-5, 1e-3, 1.0),
    torch.bfloat16: Tolerance(0.03, 0.2, 0.99),
}
"""Measured on trained models: fp32 differs by up to 2.5e-5, bf16 by up to 0.12."""


def mismatch(logp: Tensor, batch: Batch, tolerance: Tolerance) -> tuple[Record, bool]:
    """The difference between learner and sampler over the trained tokens, and whether it is within `tolerance`."""
    difference = (logp - batch.behavior_logp)[batch.mask].abs().double()
    if not difference.numel():
        return {"mismatch_mean": 0.0, "mismatch_max": 0.0}, True
    extreme = torch.quantile(difference, tolerance.quantile).item()
    record = {"mismatch_mean": difference.mean().item(), "mismatch_max": difference.max().item()}
    return record, record["mismatch_mean"] <= tolerance.mean and extreme <= tolerance.extreme


@dataclass(frozen=True, slots=True)
class Agreement:
    """Checks a first batch: `logprobs(batch, temperature)` gives those of the learner, `render` a prompt's tokens."""

    model: nn.Module
    logprobs: Callable[[Batch, float], Tensor]
    render: Callable[[Prompt], Sequence[int]]
    temperature: float
    sampling_temperature: float
    version: int
    tolerance: Tolerance

    def check(self, batch: Batch, rollouts: Sequence[Rollout]) -> Record:
        """The difference as a Record. Raises NovaError with the likely cause."""
        self._structure(batch, rollouts)
        logp = self.logprobs(batch, self.temperature)
        record, fine = mismatch(logp, batch, self.tolerance)
        if fine and not self._noisy(batch, logp):
            return record
        raise disagreement(self._cause(batch, logp, record))

    def _structure(self, batch: Batch, rollouts: Sequence[Rollout]) -> None:
        """Checks without a forward pass: masks, supports, versions, templates."""
        sampled = [sequence for rollout in rollouts if rollout.role == "train" for sequence in rollout.sequences]
        chosen = sum(
            masked or logp != 0
            for sequence in sampled
            for logp, masked in zip(sequence.behavior_logp, sequence.mask, strict=True)
        )
        lost = chosen - int(batch.mask.sum())
        if lost > 0:
            raise disagreement(
                f"the mask excludes {lost} tokens that the policy sampled "
                "(pad = eos: a mask from comparing token ids excludes the end-of-sequence token)"
            )
        unknown = sum(
            mass != 0 and masked and not (sequence.support and sequence.support[t])
            for sequence in sampled
            for t, (mass, masked) in enumerate(zip(sequence.kept_logmass, sequence.mask, strict=True))
        )
        if unknown:
            raise disagreement(
                f"{unknown} tokens were sampled from a truncated distribution (top_k, top_p or min_p), "
                "but the supports were not recorded"
            )
        stale = batch.version[batch.mask]
        if stale.numel() and int(stale.min()) != self.version:
            used = int(stale.min())
            raise disagreement(f"stale weights, the sampler used version {used}, but the learner has {self.version}")
        for prompt in {rollout.prompt.id: rollout.prompt for rollout in rollouts}.values():
            if tuple(self.render(prompt)) != tuple(prompt.tokens):
                what = "the chat template renders the prompt differently for each"
                raise disagreement(what, f"step 0, prompt {prompt.id}")

    def _noisy(self, batch: Batch, logp: Tensor) -> bool:
        """Whether two forward passes differ, because of dropout or another source of noise."""
        return any(active_dropout(self.model)) and not torch.equal(logp, self.logprobs(batch, self.temperature))

    def _cause(self, batch: Batch, logp: Tensor, record: Record) -> str:
        if self._noisy(batch, logp):
            return f"dropout is enabled in the learner (p={max(active_dropout(self.model))})"
        numbers = f"mean {record['mismatch_mean']:.2g}, max {record['mismatch_max']:.2g} nats per token"
        grid = {self.sampling_temperature, *(round(0.1 * step, 1) for step in range(1, 21))}
        candidates = sorted(grid - {self.temperature, 0.0})
        for temperature in candidates:
            _, fits = mismatch(self.logprobs(batch, temperature), batch, self.tolerance)
            if fits:
                return (
                    f"the sampler's temperature is {temperature}, but the learner's is {self.temperature} ({numbers})"
                )
        return f"{numbers}; not explained by temperature: the sampler's weights are stale or differ from the learner's"


def active_dropout(model: nn.Module) -> list[float]:
    """The probabilities of all active dropout modules."""
    found = [
        module.p for module in model.modules() if isinstance(module, nn.Dropout) and module.training and module.p > 0
    ]
    attention = [
        float(getattr(module, "attention_dropout", 0.0) or 0.0) for module in model.modules() if module.training
    ]
    return found + [p for p in attention if p > 0]


def switch_dropout_off(model: nn.Module) -> None:
    """Set every dropout probability to 0, because reinforcement learning compares two passes over the same tokens."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - a plain number, which nn.Module's type denies
