"""The metric names of other libraries, as data: which of them mean what a metric of ours means.

A name without a row keeps its own name. If that name is one of ours with another meaning, it is written as
`<library>/<name>`: TRL's `kl` is measured against the reference, our `kl` against the policy before the update.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from novarl.observe.glossary import lookup

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Name:
    """One row: `theirs` (a regular expression; groups may be used in `ours`) means `ours`.

    `kinds` are the trainers that this is true of (empty: all), `only` a condition on the trainer's settings.
    """

    theirs: str
    ours: str
    kinds: str = ""
    only: Callable[[Settings], bool] | None = None

    def apply(self, name: str, kind: str, settings: Settings) -> str | None:
        """Our name for `name`, or None."""
        found = re.fullmatch(self.theirs, name)
        if found is None or (self.kinds and kind not in self.kinds.split()):
            return None
        return None if self.only is not None and not self.only(settings) else found.expand(self.ours)


def _plain_kl(settings: Settings) -> bool:
    """With `use_bias_correction_kl` TRL multiplies the KL by pi / pi_old, which is 1 in the first update only."""
    if not settings.get("use_bias_correction_kl", True):
        return True
    steps, accumulated = settings.get("steps_per_generation"), settings.get("gradient_accumulation_steps", 1)
    return settings.get("num_iterations", 1) == 1 and (steps is None or steps <= accumulated)


def _per_token(settings: Settings) -> bool:
    return settings.get("importance_sampling_level", "token") == "token"


def _cross_entropy(settings: Settings) -> bool:
    return settings.get("loss_type") in (None, "nll", "chunked_nll")


TRL = (
    Name("learning_rate", "lr"),
    Name("grad_norm", "grad_norm"),
    Name("entropy", "entropy", "grpo rloo online sft"),
    Name("entropy_coef", "entropy_coef", "grpo"),
    Name("loss", "total_loss", "grpo rloo online"),
    Name("loss", "loss", "sft", only=_cross_entropy),
    Name("loss", "loss", "dpo reward"),
    Name("reward", "reward_mean", "grpo rloo online"),
    Name("reward_std", "reward_std", "grpo rloo online"),
    Name("rewards/([^/]+)/mean", r"rewards/\1_mean", "grpo rloo online"),
    Name("kl", "kl_mean", "grpo", only=_plain_kl),
    Name("kl", "rollout_kl_mean", "rloo"),
    Name("clip_ratio/region_mean", "clip_fraction", "grpo", only=_per_token),
    Name("completions/mean_length", "length_mean", "grpo rloo online"),
    Name("completions/max_length", "length_max", "grpo rloo online"),
    Name("completions/clipped_ratio", "truncated_fraction", "grpo rloo online"),
    Name("step_time", "time/step_time"),
    Name("mean_token_accuracy", "accuracy", "sft"),
    Name("rewards/chosen", "reward_chosen_mean", "dpo"),
    Name("rewards/rejected", "reward_rejected_mean", "dpo"),
    Name("rewards/margins", "reward_margin", "dpo"),
    Name("rewards/accuracies", "preference_accuracy", "dpo"),
    Name("margin", "reward_margin", "reward"),
    Name("accuracy", "preference_accuracy", "reward"),
)
"""TRL 1.16. `kinds`: grpo, rloo, sft, dpo, reward; `online` is one of the first two, where it is not known which.
Another trainer's kind is its own name."""

TRL_HELD_OUT = (
    Name("eval_(.*runtime|.*_per_second)", r"time/eval_\1"),
    Name("eval_completions/mean_length", "eval/length_mean"),
    Name("eval_completions/clipped_ratio", "eval/truncated_fraction"),
)
"""The same for evaluations. `eval_reward` is of sampled answers, our `eval/score` of greedy ones."""

OPENRLHF = (
    Name("policy_loss", "policy_loss"),
    Name("rollout/reward_mean", "reward_mean"),
    Name("rollout/reward_std", "reward_std"),
    Name("reward", "reward_mean"),
    Name("rollout/response_length_mean", "length_mean"),
    Name("response_length", "length_mean"),
    Name("rollout/truncated_rate", "truncated_fraction"),
    Name("rollout/num_samples", "episodes"),
    Name("ppo_clip_ratio", "clip_fraction"),
    Name("entropy_loss", "entropy"),
    Name("actor_grad_norm", "grad_norm"),
    Name("actor_lr", "lr"),
    Name("critic_loss", "value_loss"),
    Name("critic_grad_norm", "critic_grad_norm"),
    Name("critic_lr", "critic_lr"),
    Name("timing/([^/]+)", r"time/\1_s"),
)
"""OpenRLHF 0.11. `kl` (whose estimator is a setting), `ppo_kl`, `vllm_kl` and `return` have no equal of ours."""


@dataclass(frozen=True, slots=True)
class Translated:
    """Numbers under our names; {their name: our name} of those that were renamed; the names whose values are neither
    numbers nor None."""

    metrics: dict[str, float]
    renamed: dict[str, str]
    refused: list[str]


def translate(
    values: Mapping[str, Any], table: Sequence[Name], library: str, kind: str = "", settings: Settings | None = None
) -> Translated:
    """The numbers among `values` under our names.

    If two names mean the same, the one whose row is first wins, and the other keeps its own name. None is absent.
    """
    values = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    metrics: dict[str, float] = {}
    renamed: dict[str, str] = {}
    refused = [name for name, value in values.items() if value is not None and not isinstance(value, Real)]
    places = {name: _ours(name, table, kind, settings or {}) for name in values}
    for name, value in sorted(values.items(), key=lambda item: places[item[0]][0]):
        if not isinstance(value, Real):
            continue
        ours = places[name][1]
        if ours is None or ours in metrics:
            ours = f"{library}/{name}" if _means_something(name) else name
        metrics[ours] = float(value)
        if ours != name:
            renamed[name] = ours
    return Translated(metrics, renamed, refused)


def _ours(name: str, table: Sequence[Name], kind: str, settings: Settings) -> tuple[int, str | None]:
    """The place of the first row that applies, and our name."""
    for place, row in enumerate(table):
        if (ours := row.apply(name, kind, settings)) is not None:
            return place, ours
    return len(table), None


def _means_something(name: str) -> bool:
    """Whether the glossary has a metric of this name."""
    try:
        lookup(name)
    except KeyError:
        return name in ("phase", "schema", "nonfinite")
    return True


SECRET = re.compile(
    r"(hub|hf|auth|access|api|write|bearer)_?token$|^(token|key)$|api_?key|password|secret|credential", re.IGNORECASE
)
"""Names of settings that are not written to disk."""


def plain_settings(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """`settings` without secrets, as plain values; what JSON cannot express becomes text."""
    return {str(name): _plain(value) for name, value in settings.items() if not SECRET.search(str(name))}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain_settings(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
