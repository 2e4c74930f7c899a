"""The definition of every metric: formula, unit, better direction, healthy range.

A Record may only contain metrics from this table; `lookup` refuses others. `NOTATION` explains the notation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Literal

NOTATION = """\
pi is the policy being trained, pi_old the policy before the rollout's first update, mu the sampling policy as recorded
by the sampler, and pi_ref the reference policy. In runs without a reference, pi_ref is the policy before the update, so
that `kl_mean` and related metrics measure how far the update moved the policy, like `kl`. `kl` is measured on the first
trajectories of the minibatch, which together have 1/32 of its trained tokens, but at least 64 and at most 256.
mean_t is the mean over the trained tokens (mask True) of the whole update, mean_i over its trajectories. Logarithms are
natural.
"""

Direction = Literal["up", "down", "watch"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `direction` "watch": neither direction is better. `deterministic`: two identical runs agree in it."""

    formula: str
    unit: str
    direction: Direction = "watch"
    healthy: str = ""
    deterministic: bool = True


PROGRESS = {
    "step": Metric("completed rollout phases (RL) or batches (SFT)", "steps"),
    "update": Metric("completed optimizer updates", "updates"),
    "epoch": Metric("pass over the training rows that the batch's last row belongs to, from 1", "epochs"),
    "lr": Metric("learning rate of this update", "1"),
}

LOSSES = {
    "total_loss": Metric(
        "policy_loss + kl_coef * KL if KL is in the loss - entropy_coef * H: the loss that is differentiated", "nats"
    ),
    "policy_loss": Metric("sum_t w_t * surrogate_t with the aggregation's weights w; near 0 when ratios are 1", "nats"),
    "kl_loss": Metric("sum_t w_t * KL_t(pi, pi_ref), before kl_coef; 0 if KL is not in the loss", "nats", "down"),
    "loss": Metric(
        "sft: -mean_t log pi(token_t), the cross-entropy; dpo, rm: mean of the chosen loss over pairs or rows",
        "nats/token; nats",
        "down",
        "falls, then flattens",
    ),
    "perplexity": Metric("exp(loss)", "1", "down", "falls; 1 is the minimum"),
    "accuracy": Metric("mean_t [argmax pi == token_t]", "share", "up", "rises"),
    "micro_batches": Metric(
        "micro-batches of the update over all ranks, as set by `micro.max_tokens`", "micro-batches", deterministic=False
    ),
    "grad_norm": Metric(
        "L2 norm of the whole gradient, before clipping", "1", healthy="no jumps beyond a factor of 10"
    ),
}

POLICY = {
    "policy_objective": Metric("sum_t w_t * ratio_t * A_t: the surrogate without clipping", "reward", "up"),
    "kl": Metric(
        "mean_t k3(pi_before, pi_after): how far this update moved the policy; measured after it, never clamped",
        "nats/token",
        healthy="1e-5 to 1e-2; below 1e-12 the update had no effect",
    ),
    "kl_to_ref": Metric(
        "mean_t log pi - log pi_ref (k1); may be below 0", "nats/token", healthy="rises slowly, below 1"
    ),
    "kl_mean": Metric(
        "mean_t k3(pi, pi_ref) = mean_t exp(-d) - 1 + d, d = log pi - log pi_ref",
        "nats/token",
        healthy="rises slowly, below 1",
    ),
    "kl_sequence": Metric(
        "mean_i sum_t k3(pi, pi_ref): the same per trajectory", "nats", healthy="kl_mean times the mean length"
    ),
    "rollout_kl_mean": Metric(
        "mean_t k1(pi_old, pi_ref) over all answers of a step: the input of controllers if a step has several updates",
        "nats/token",
        healthy="rises slowly, below 1",
    ),
    "rollout_kl_sequence": Metric(
        "mean_i sum_t k1(pi_old, pi_ref): the same per trajectory",
        "nats",
        healthy="rollout_kl_mean times the mean length",
    ),
    "kl_to_old": Metric(
        "mean_t k3(pi_old, pi) on the whole minibatch, after the step; limited by step guards", "nats/token", "down"
    ),
    "step_fraction": Metric(
        "fraction of the step that remains after a rollback: 1, 1/2, 1/4, ..., 0", "share", "up", "1"
    ),
    "split_micro_batches": Metric(
        "micro-batches that did not fit in memory and were split, over all ranks; absent if there were none",
        "micro-batches",
        "down",
        "absent",
        deterministic=False,
    ),
    "skipped_update": Metric(
        "1 if a guard undid the update, or did not take it since its gradient is not finite (guard.on_alert)",
        "share",
        "down",
        "0",
    ),
    "stop_rollout": Metric("1 if a step guard ended the rollout's updates", "share", "down", "0"),
    "kl_std": Metric("standard deviation over t of k3(pi, pi_ref)", "nats/token", healthy="about as large as kl_mean"),
    "kl_penalty": Metric("kl_coef * KL as it enters the loss, the reward or the advantage", "nats", "down"),
    "kl_coef": Metric("coefficient of the KL term; 0 if there is none", "1"),
    "entropy_coef": Metric("coefficient of the entropy bonus; adapted if entropy.target is set", "1"),
    "entropy": Metric(
        "mean_t H(pi(. | before t)) at the training temperature; over the allowed tokens with top_k, top_p, min_p",
        "nats/token",
        healthy="falls slowly; a fall to 0 early is collapse",
    ),
    "ratio_mean": Metric("mean_t pi / pi_old", "1", healthy="0.9 to 1.1; 1 on the first update"),
    "ratio_max": Metric("max_t pi / pi_old", "1", healthy="below 10"),
    "clip_fraction": Metric("share of tokens with active clipping, whose gradient is 0", "share", healthy="below 0.3"),
    "correction_mean": Metric("mean_t min(pi_old / mu, correction.max)", "1", healthy="0.95 to 1"),
    "effective_sample_size": Metric(
        "(sum_t w_t)^2 / (n sum_t w_t^2) over the n trained tokens, w the correction's weight, or pi_old / mu without "
        "a correction",
        "share",
        "up",
        "above 0.9; 1 where sampler and learner agree",
    ),
    "mismatch_mean": Metric(
        "mean_t |log pi - log mu|: learner against sampler, plus the policy's change after the first update",
        "nats",
        "down",
        "fp32 below 1e-5, bf16 below 0.03, on the first update",
    ),
    "mismatch_max": Metric("max_t |log pi - log mu|", "nats", "down", "fp32 below 1e-3 on the first update"),
    "staleness": Metric(
        "mean_i number of updates between the weights that sampled and those that are trained", "updates", "down"
    ),
}

CREDIT = {
    "gpg_alpha": Metric(
        "factor of the advantages with loss.surrogate=gpg: B / (B - M), B groups, M of them with identical rewards",
        "1",
        healthy="1 to 2; higher values: few groups have a learning signal",
    ),
    "value_loss": Metric(
        "mean_t (V - R)^2 / 2, or its clipped form, in the last critic update",
        "reward^2",
        "down",
        "falls, then follows the policy",
    ),
    "value_mean": Metric("mean_t V(state before t), as used for advantages", "reward", healthy="near return_mean"),
    "return_mean": Metric("mean_t of the return that is the critic's target", "reward", "up"),
    "explained_variance": Metric(
        "1 - Var(R - V) / Var(R) over t", "share", "up", "rises towards 1; at or below 0: no help"
    ),
    "value_clip_fraction": Metric("share of values for which the clipped loss is larger", "share", healthy="below 0.3"),
    "critic_grad_norm": Metric("L2 norm of the critic's gradient, before clipping", "1"),
    "critic_lr": Metric("learning rate of the critic's update", "1"),
    "value_states": Metric("distinct states whose value was estimated by continuations", "states"),
    "value_tokens": Metric("tokens generated for those estimates, never trained on", "tokens"),
    "value_cost": Metric("value_tokens per token that the policy chose", "1", "down"),
    "value_std": Metric(
        "mean over states of the standard deviation of its continuations' rewards",
        "reward",
        healthy="0 if the outcome is already determined",
    ),
    "process_loss": Metric(
        "mean_i cross-entropy of sigma(sum_t process reward) and the outcome", "nats", "down", "falls below 0.69"
    ),
    "process_accuracy": Metric("mean_i [sign of sum_t process reward == outcome]", "share", "up", "above 0.5"),
    "process_grad_norm": Metric("L2 norm of the process reward model's gradient", "1"),
    "process_reward_mean": Metric("mean_t beta (log phi - log pi_ref)", "reward"),
    "process_reward_std": Metric("standard deviation over t of the process reward", "reward"),
    "objective/<name>_mean": Metric("mean_i of an objective, as measured", "its own"),
    "objective/<name>_weight": Metric(
        "weight of the objective's raw value in the reward; negative if it is minimized", "1"
    ),
    "kl_multiplier": Metric("multiplier of the KL constraint, part of kl_coef", "1", "down"),
    "kl_violation": Metric("KL minus its limit; above 0 is a violation", "nats", "down", "at most 0"),
    "entropy_multiplier": Metric("multiplier of the entropy constraint, part of entropy_coef", "1", "down"),
    "entropy_violation": Metric("entropy limit minus entropy; above 0 is a violation", "nats", "down", "at most 0"),
}

REWARDS = {
    "reward_mean": Metric("mean_i of the reward, over the rollouts that are trained on", "reward", "up", "rises"),
    "reward_std": Metric(
        "standard deviation over i of the reward", "reward", healthy="above 0; without it there is no learning signal"
    ),
    "reward_raw_mean": Metric(
        "mean reward over all rollouts that did not fail, before any filter", "reward", "up", "rises"
    ),
    "rewards/<name>_mean": Metric("mean_i of a named reward, before weighting", "reward", "up"),
    "logged/<name>": Metric(
        "a number that a reward function logged with log_metric, mean over the step's rollouts", "its own"
    ),
    "advantage_mean": Metric("mean_t of the advantage", "reward", healthy="near 0 with a baseline"),
    "advantage_std": Metric("standard deviation over t of the advantage", "reward", healthy="above 0"),
    "zero_variance_groups": Metric(
        "groups trained on with identical rewards; their advantage is 0", "groups", "down", "below half"
    ),
    "groups_kept": Metric("groups that are trained on", "groups", "up"),
    "groups_dropped": Metric("groups that were sampled but not trained on", "groups", "down"),
    "failed_rollouts": Metric(
        "rollouts whose episode or reward failed; they are excluded, not scored 0", "rollouts", "down", "0"
    ),
    "episodes": Metric("rollouts sampled for the step", "rollouts"),
}

LENGTHS = {
    "length_mean": Metric(
        "mean_i number of tokens generated by the policy",
        "tokens",
        healthy="changes slowly; a drift towards the limit is a warning",
    ),
    "length_max": Metric("longest completion", "tokens", healthy="below the limit"),
    "truncated_fraction": Metric("share of trajectories that were truncated by a limit", "share", "down", "below 0.1"),
    "prompt_tokens": Metric("tokens not generated by the policy: prompts and environment messages", "tokens"),
    "turns_mean": Metric("mean number of model turns per rollout; absent if no rollout has more than one", "turns"),
    "completion_tokens": Metric("tokens generated by the policy", "tokens"),
    "tokens": Metric("all tokens of the update", "tokens"),
}

SCORES = {
    "eval/score": Metric(
        "mean over the held-out rows of the greedy answer's score (the task's or the reward); sft without a task: mean "
        "of mean_t log pi(token_t), at most 0; dpo, rm: share of pairs whose chosen answer has the higher reward, or "
        "of answers whose reward has the label's sign, ties counting half",
        "score; nats/token; share",
        "up",
        "rises; dpo, rm: above 0.5; falling again means overfitting",
    ),
    "eval/score_low": Metric("lower end of the 95% confidence interval (Wilson's for shares)", "as eval/score", "up"),
    "eval/score_high": Metric("upper end of the 95% confidence interval", "as eval/score", "up"),
    "eval/n": Metric("held-out rows", "rows"),
    "eval/pass_at_<k>": Metric(
        "probability that at least one of k samples is correct (reward >= 1), unbiased estimate from n >= k samples "
        "(arXiv 2107.03374)",
        "share",
        "up",
    ),
    "eval/hypervolume": Metric(
        "volume dominated by all evaluations so far above the reference point, one axis per objective",
        "product of the objectives'",
        "up",
        "rises from 0 if the reference is the first evaluation",
    ),
    "eval/length_mean": Metric("mean number of tokens of the held-out answers", "tokens"),
    "eval/truncated_fraction": Metric("share of held-out answers truncated by a limit", "share", "down", "below 0.1"),
}

PREFERENCE = {
    "preference_accuracy": Metric(
        "share of pairs whose chosen answer has the higher reward; ties count as wrong (in eval/score as half)",
        "share",
        "up",
        "from 0 (dpo: all rewards start equal) or about 0.5 to 0.6-0.9; 1 on noisy labels means memorization",
    ),
    "label_accuracy": Metric("share of labeled answers whose reward has the label's sign", "share", "up", "rises"),
    "reward_margin": Metric(
        "mean over pairs of reward(chosen) - reward(rejected); dpo: reward = beta log(pi / pi_ref), or without a "
        "reference beta log pi / tokens",
        "reward",
        "up",
        "rises from 0, then flattens",
    ),
    "reward_chosen_mean": Metric("mean reward of chosen (or good) answers", "reward", healthy="dpo: not far below 0"),
    "reward_rejected_mean": Metric("mean reward of rejected (or bad) answers", "reward", "down", "falls"),
    "chosen_logp_mean": Metric(
        "mean over chosen answers of log pi(answer), summed over its tokens", "nats/answer", "up", "falls slightly"
    ),
    "rejected_logp_mean": Metric("the same over rejected answers", "nats/answer", "down", "falls"),
    "kto_point": Metric(
        "max(0, mean log(pi / pi_ref) over mismatched prompt-answer pairs): KTO's reference point",
        "nats/answer",
        healthy="0 or slightly above",
    ),
    "eval/auroc": Metric(
        "probability that a good row has a higher reward than a bad one, ties counting half; a pair counts as two rows",
        "share",
        "up",
        "above 0.5",
    ),
    "eval/ece": Metric(
        "sum_b n_b / n |mean sigma(reward) - share of good rows| over 10 bins (arXiv 1706.04599)",
        "share",
        "down",
        "below 0.05; higher with few rows",
    ),
    "eval/brier": Metric("mean (sigma(reward) - label)^2", "1", "down", "below 0.25"),
}

MACHINE = {
    "time/<name>_s": Metric("seconds in one stage since the last record", "s", "down", deterministic=False),
    "episodes_per_second": Metric("trajectories of the step / its seconds", "1/s", "up", deterministic=False),
    "tokens_per_second": Metric(
        "tokens generated by the policy / seconds of the step", "tokens/s", "up", deterministic=False
    ),
    "memory_rss_mb": Metric("peak resident memory of the process", "MB", "down", "flat", deterministic=False),
    "memory_device_mb": Metric(
        "peak memory of tensors on the CUDA device; absent without one", "MB", "down", "flat", deterministic=False
    ),
}

SECTIONS = {
    "Progress": PROGRESS,
    "Losses": LOSSES,
    "Policy": POLICY,
    "Credit": CREDIT,
    "Rewards": REWARDS,
    "Lengths": LENGTHS,
    "Evaluations": SCORES,
    "Preferences and reward models": PREFERENCE,
    "Time and machine": MACHINE,
}

METRICS = {name: metric for section in SECTIONS.values() for name, metric in section.items()}
"""All metrics by name; `<name>` is a name without a slash, `<k>` a whole number."""

_HOLES = {"<name>": "[^/]+", "<k>": "[0-9]+"}


def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name)
    for hole, expression in _HOLES.items():
        text = text.replace(re.escape(hole), expression)
    return re.compile(text)


_PATTERNS = {_pattern(name): metric for name, metric in METRICS.items() if "<" in name}


def lookup(name: str) -> Metric:
    """The entry of a metric. KeyError with the closest match if there is none.

    >>> lookup("rewards/length_mean").unit
    'reward'
    """
    if name in METRICS and "<" not in name:
        return METRICS[name]
    for pattern, metric in _PATTERNS.items():
        if pattern.fullmatch(name):
            return metric
    nearest = get_close_matches(name, METRICS, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise KeyError(f"no metric {name!r} in novarl/observe/glossary.py{hint}")


@lru_cache(maxsize=4096)  # called for every column of every line, and slow for names without an entry
def deterministic(name: str) -> bool:
    """Whether two identical runs agree in this metric. True for unknown names, so that differences are found."""
    try:
        return lookup(name).deterministic
    except KeyError:
        return True
