"""The plumbing faults of the table of alerts: ways in which sampler and learner come to disagree.

With d = log pi_learner - log mu of each sampled token, mu being the distribution of the sampler. `plumbing` tells the
faults apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from novarl.observe.stability.alerts import Rule

COLUMNS = ("behavior_logp", "old_logp")
DTYPE, DROPOUT, TRUNCATED = "dtype", "dropout", "truncated_sampling"
TEMPERATURE, TEMPLATE, PADDING = "temperature", "template", "padding"
STALE, ADAPTER = "stale_weights", "adapter_not_delivered"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run says about its sampling: `dtype` (None: unknown), whether it trains `adapters`, and by how many steps
    its samples lag on purpose."""

    dtype: str | None = None
    adapters: bool = False
    lag: int = 0


PLUMBING = (
    Rule(
        DROPOUT,
        "plumbing",
        "Noise in the learner, such as dropout",
        (*COLUMNS, "tokens", "logp"),
        "the learner gives the same token in the same context two log-probabilities",
        "Turn dropout off in the model that is trained (NovaRL does so when it loads one)",
        severity="critical",
    ),
    Rule(
        TRUNCATED,
        "plumbing",
        "Truncated sampling (top_k, top_p, min_p) that the learner does not correct",
        COLUMNS,
        "d is never above 0 and its mean is below 0: the sampler renormalized over fewer tokens",
        "Record the supports of truncated sampling, or sample with top_p=1, top_k=0 and min_p=0",
        severity="critical",
    ),
    Rule(
        PADDING,
        "plumbing",
        "Padding or wrong positions",
        (*COLUMNS, "prompt lengths"),
        "d is 0 in the rows with the longest prompts and not in those with shorter ones",
        "Pass the attention mask and the position ids of padded rows to the model, on both sides",
        severity="critical",
    ),
    Rule(
        TEMPERATURE,
        "plumbing",
        "Sampler and learner use different temperatures",
        (*COLUMNS, "entropy"),
        "d is proportional to log pi + H, as for a rescaled distribution",
        "Use the same temperature for sampling and for the learner's log-probabilities",
        severity="critical",
    ),
    Rule(
        TEMPLATE,
        "plumbing",
        "Another chat template, or tokens that were decoded and encoded again",
        COLUMNS,
        "d is far larger than the updates explain, or a few tokens differ strongly and all others agree",
        "Train on the token ids that were sampled, with the prompt that was sampled from",
        severity="critical",
    ),
    Rule(
        STALE,
        "plumbing",
        "The sampler has older weights than the learner",
        (*COLUMNS, "kl"),
        "d is 0 before the first update and as large as the last updates moved the policy",
        "Publish the weights to the sampler before every rollout, or correct for the lag (correction.tis_max)",
        severity="critical",
    ),
    Rule(
        ADAPTER,
        "plumbing",
        "The sampler does not get the adapter: it samples from the base model",
        (*COLUMNS, "ref_logp", "kl"),
        "in a run with adapters, mu is the base policy, or d grows with all updates together",
        "Merge the adapter into the weights that the sampler gets, or load the adapter there after every update",
        severity="critical",
    ),
    Rule(
        DTYPE,
        "plumbing",
        "Sampler and learner compute in different precision",
        COLUMNS,
        "d is small and symmetric noise that repeats in equal contexts and does not follow the updates",
        "Use the same dtype on both sides, or correct for the difference (correction.tis_max)",
    ),
)
"""In the order in which they are tested."""
