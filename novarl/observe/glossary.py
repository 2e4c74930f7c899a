"""What every metric means: its formula, unit, the direction that is good, what is healthy, how it is reduced.

A Record may only hold names that stand here; `lookup` refuses any other. Their notation is `NOTATION`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Literal

NOTATION = """\
pi is the policy being trained, pi_old the policy before the rollout's first update, mu what the sampler recorded,
pi_ref the reference. Where a run has none, pi_ref is the policy before the update, so that `kl_mean` and its likes say
how far the update moved, as `kl` does: on the minibatch's first trajectories, as many as hold a thirty-second of its
trained tokens, within 64 and 256. mean_t runs over the trained tokens (mask True) of the whole update, mean_i over its
trajectories. Logarithms are natural.
"""

Direction = Literal["up", "down", "watch"]
Reduction = Literal["mean", "sum", "max", "same"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `direction` "watch" has no better end: look at how it moves.

    `reduction` says how parts from micro-batches and ranks become one number: "mean" adds totals and weights and
    divides once, "sum" adds, "max" takes the largest, "same" is equal everywhere already. `deterministic` is False
    where the clock or the machine decides: two equal runs then differ in it.
    """

    formula: str
    unit: str
    direction: Direction = "watch"
    healthy: str = ""
    reduction: Reduction = "mean"
    deterministic: bool = True


PROGRESS = {
    "step": Metric("rollout phases (RL) or batches (SFT) finished", "steps", reduction="same"),
    "update": Metric("optimiser updates finished", "updates", reduction="same"),
    "epoch": Metric(
        "which pass over the training rows the last row of the batch belongs to, from 1", "epochs", reduction="same"
    ),
    "lr": Metric("learning rate of this update", "1", reduction="same"),
}

LOSSES = {
    "total_loss": Metric(
        "policy_loss + kl_coef * KL where KL is in the loss - entropy_coef * H: what backward sees",
        "nats",
        reduction="sum",
    ),
    "policy_loss": Metric(
        "sum_t w_t * surrogate_t, w the aggregation's weights; near 0 when ratios are 1", "nats", reduction="sum"
    ),
    "kl_loss": Metric(
        "sum_t w_t * KL_t(pi, pi_ref), before kl_coef; 0 where KL is not in the loss", "nats", "down", reduction="sum"
    ),
    "loss": Metric(
        "sft: -mean_t log pi(token_t), cross-entropy of the demonstrated tokens; dpo, rm: mean over pairs or rows of "
        "the loss that is named",
        "nats/token; nats",
        "down",
        "falls, then flattens",
    ),
    "perplexity": Metric("exp(loss)", "1", "down", "falls; 1 is certainty"),
    "accuracy": Metric("mean_t [argmax pi == token_t]", "share", "up", "rises"),
    "micro_batches": Metric(
        "micro-batches that the update's gradient took, over all ranks: as many as `micro.max_tokens` makes",
        "micro-batches",
        reduction="sum",
        deterministic=False,
    ),
    "grad_norm": Metric(
        "L2 norm of the whole gradient, before clipping", "1", healthy="no jumps; within a decade", reduction="same"
    ),
}

POLICY = {
    "policy_objective": Metric(
        "sum_t w_t * ratio_t * A_t: the surrogate without its clip", "reward", "up", reduction="sum"
    ),
    "kl": Metric(
        "mean_t k3(pi_before, pi_after): how far this update moved the policy, measured after it, never clamped",
        "nats/token",
        healthy="1e-5 to 1e-2; below 1e-12 nothing was learnt",
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
        "mean_t k1(pi_old, pi_ref) on all of a step's answers: what controllers see where a step has several updates",
        "nats/token",
        healthy="rises slowly, below 1",
    ),
    "rollout_kl_sequence": Metric(
        "mean_i sum_t k1(pi_old, pi_ref): the same per trajectory",
        "nats",
        healthy="rollout_kl_mean times the mean length",
    ),
    "kl_to_old": Metric(
        "mean_t k3(pi_old, pi) on the whole minibatch, after the step: what a step guard bounds", "nats/token", "down"
    ),
    "step_fraction": Metric(
        "how much of the step the rollback let stand: 1, 1/2, 1/4, ..., 0", "share", "up", "1", reduction="same"
    ),
    "split_micro_batches": Metric(
        "micro-batches that did not fit in memory and were split, over all ranks; absent where none was",
        "micro-batches",
        "down",
        "absent",
        reduction="sum",
        deterministic=False,
    ),
    "stop_rollout": Metric("1 where a step guard ended the rollout's updates", "share", "down", "0", reduction="same"),
    "kl_std": Metric("standard deviation over t of k3(pi, pi_ref)", "nats/token", healthy="of the size of kl_mean"),
    "kl_penalty": Metric("kl_coef * KL as it enters the loss, the reward or the advantage", "nats", "down"),
    "kl_coef": Metric("coefficient of the KL term, 0 where there is none", "1", reduction="same"),
    "entropy_coef": Metric(
        "coefficient of the entropy bonus; with entropy.target it moves to hold entropy there", "1", reduction="same"
    ),
    "entropy": Metric(
        "mean_t H(pi(. | before t)) at the training temperature; within the possible tokens under top_k, top_p, min_p",
        "nats/token",
        healthy="falls slowly; a fall to 0 early is collapse",
    ),
    "ratio_mean": Metric("mean_t pi / pi_old", "1", healthy="0.9 to 1.1; 1 on the first update"),
    "ratio_max": Metric("max_t pi / pi_old", "1", healthy="below 10", reduction="max"),
    "clip_fraction": Metric(
        "share of tokens where the clip is active, so that their gradient is 0", "share", healthy="below 0.3"
    ),
    "correction_mean": Metric("mean_t min(pi_old / mu, correction.max)", "1", healthy="0.95 to 1"),
    "effective_sample_size": Metric(
        "(sum_t w_t)^2 / (n sum_t w_t^2) over the n trained tokens, w the correction's weight, or pi_old / mu where "
        "there is none: the share of tokens that the weights leave effective",
        "share",
        "up",
        "above 0.9; 1 where sampler and learner agree",
        reduction="same",
    ),
    "mismatch_mean": Metric(
        "mean_t |log pi - log mu|: learner against sampler, and after a rollout's first update the own move",
        "nats",
        "down",
        "fp32 below 1e-5, bf16 below 0.03, on the first update",
    ),
    "mismatch_max": Metric(
        "max_t |log pi - log mu|", "nats", "down", "fp32 below 1e-3 on the first update", reduction="max"
    ),
    "staleness": Metric(
        "mean_i updates between the weights that sampled a trajectory and those that learn from it", "updates", "down"
    ),
}

CREDIT = {
    "gpg_alpha": Metric(
        "B / (B - M), B groups of which M have equal rewards: by what loss.surrogate=gpg multiplies the advantages",
        "1",
        healthy="1 to 2; higher, few groups teach anything",
        reduction="same",
    ),
    "value_loss": Metric(
        "mean_t (V - R)^2 / 2, or its clipped form; the critic's last update of this policy update",
        "reward^2",
        "down",
        "falls, then follows the policy",
    ),
    "value_mean": Metric("mean_t V(state before t), as credit used it", "reward", healthy="near return_mean"),
    "return_mean": Metric("mean_t of the return the critic is trained towards", "reward", "up"),
    "explained_variance": Metric(
        "1 - Var(R - V) / Var(R) over t", "share", "up", "rises towards 1; at or below 0 the critic is no help", "same"
    ),
    "value_clip_fraction": Metric("share of values whose clipped loss is the larger one", "share", healthy="below 0.3"),
    "critic_grad_norm": Metric("L2 norm of the critic's gradient, before clipping", "1", reduction="same"),
    "critic_lr": Metric("learning rate of the critic's update", "1", reduction="same"),
    "value_states": Metric("different states whose value was estimated by continuations", "states", reduction="same"),
    "value_tokens": Metric("tokens generated for those estimates, never trained on", "tokens", reduction="same"),
    "value_cost": Metric("value_tokens per token that the policy chose", "1", "down", reduction="same"),
    "value_std": Metric(
        "mean over states of the standard deviation of its continuations' rewards",
        "reward",
        healthy="0 where everything is decided",
        reduction="same",
    ),
    "process_loss": Metric(
        "mean_i cross-entropy of sigma(sum_t process reward) and the outcome", "nats", "down", "falls below 0.69"
    ),
    "process_accuracy": Metric("mean_i [sign of sum_t process reward == outcome]", "share", "up", "above a half"),
    "process_grad_norm": Metric("L2 norm of the process reward model's gradient", "1", reduction="same"),
    "process_reward_mean": Metric("mean_t beta (log phi - log pi_ref)", "reward", reduction="same"),
    "process_reward_std": Metric("standard deviation over t of the same", "reward", reduction="same"),
    "objective/<name>_mean": Metric("mean_i of one of several objectives, as measured", "its own", reduction="same"),
    "objective/<name>_weight": Metric(
        "weight of the objective's raw value in the reward; below 0 where less is better", "1", reduction="same"
    ),
    "kl_multiplier": Metric("multiplier of the KL constraint, part of kl_coef", "1", "down", reduction="same"),
    "kl_violation": Metric("KL less its limit; above 0 the bound is broken", "nats", "down", "at most 0", "same"),
    "entropy_multiplier": Metric(
        "multiplier of the entropy floor, part of entropy_coef", "1", "down", reduction="same"
    ),
    "entropy_violation": Metric("the floor less the entropy", "nats", "down", "at most 0", "same"),
}

REWARDS = {
    "reward_mean": Metric("mean_i of the reward, over the rollouts that are learnt from", "reward", "up", "rises"),
    "reward_std": Metric(
        "standard deviation over i of the same", "reward", healthy="above 0: without spread nothing is learnt"
    ),
    "reward_raw_mean": Metric(
        "mean of the reward over all rollouts sampled that did not fail, before any filter: the honest curve",
        "reward",
        "up",
        "rises",
    ),
    "rewards/<name>_mean": Metric("mean_i of one named reward, before its weight", "reward", "up"),
    "logged/<name>": Metric(
        "a number that a reward function logged by log_metric, mean over the step's rollouts", "its own"
    ),
    "advantage_mean": Metric("mean_t of the advantage", "reward", healthy="near 0 with a baseline"),
    "advantage_std": Metric("standard deviation over t of the advantage", "reward", healthy="above 0"),
    "zero_variance_groups": Metric(
        "groups learnt from whose rewards are all equal: their advantage is 0", "groups", "down", "below half", "same"
    ),
    "groups_kept": Metric("groups that are learnt from", "groups", "up", reduction="same"),
    "groups_dropped": Metric("groups that were sampled and not learnt from", "groups", "down", reduction="same"),
    "failed_rollouts": Metric(
        "rollouts whose episode or reward failed: counted, left out, never scored 0",
        "rollouts",
        "down",
        "0",
        reduction="same",
    ),
    "episodes": Metric("rollouts sampled for the step", "rollouts", reduction="same"),
}

LENGTHS = {
    "length_mean": Metric(
        "mean_i of the tokens that the policy chose",
        "tokens",
        healthy="moves slowly; a drift to the limit is a warning",
    ),
    "length_max": Metric("longest completion", "tokens", healthy="below the limit", reduction="max"),
    "truncated_fraction": Metric(
        "share of trajectories stopped by a limit and not by themselves", "share", "down", "below 0.1"
    ),
    "prompt_tokens": Metric(
        "tokens that the policy did not choose: prompts, and answers of an environment", "tokens", reduction="sum"
    ),
    "turns_mean": Metric(
        "mean over the rollouts that are used of the turns the policy took; absent where none took more than one",
        "turns",
    ),
    "completion_tokens": Metric("tokens that the policy chose", "tokens", reduction="sum"),
    "tokens": Metric("all tokens of the update", "tokens", reduction="sum"),
}

SCORES = {
    "eval/score": Metric(
        "mean over the held-out rows of the score of the greedy answer, the task's own or the reward; sft without a "
        "task: of mean_t log pi(token_t), 0 is certainty; dpo, rm: share of pairs whose chosen answer is rewarded "
        "more, or of answers whose reward has the label's sign, a tie counting half",
        "score; nats/token; share",
        "up",
        "rises; dpo, rm: above 0.5, and falls again where it overfits",
    ),
    "eval/score_low": Metric("lower end of its 95 % interval, Wilson's for shares", "as eval/score", "up"),
    "eval/score_high": Metric("upper end of its 95 % interval", "as eval/score", "up"),
    "eval/n": Metric("held-out rows", "rows", reduction="same"),
    "eval/pass_at_<k>": Metric(
        "chance that one of k samples is right, unbiased from n >= k samples (arXiv 2107.03374); right: its reward is "
        "at least 1",
        "share",
        "up",
    ),
    "eval/hypervolume": Metric(
        "volume that all evaluations so far dominate above the reference point, one axis for each objective",
        "product of the objectives'",
        "up",
        "rises from 0 where the reference is the first evaluation",
        "same",
    ),
    "eval/length_mean": Metric("mean tokens of the held-out answers", "tokens"),
    "eval/truncated_fraction": Metric("share of held-out answers stopped by a limit", "share", "down", "below 0.1"),
}

PREFERENCE = {
    "preference_accuracy": Metric(
        "share of pairs whose chosen answer is rewarded strictly more; a tie is wrong here, half right in eval/score",
        "share",
        "up",
        "from 0 (dpo: all rewards start equal) or about a half, to 0.6 to 0.9; 1 on noisy labels is memory",
    ),
    "label_accuracy": Metric("share of labelled answers whose reward has the label's sign", "share", "up", "rises"),
    "reward_margin": Metric(
        "mean over pairs of reward(chosen) - reward(rejected); dpo: reward = beta log(pi / pi_ref), or without a "
        "reference beta log pi / tokens",
        "reward",
        "up",
        "rises from 0, then flattens",
    ),
    "reward_chosen_mean": Metric(
        "mean reward of chosen, or good, answers", "reward", healthy="dpo: not far below 0, or likelihood is lost"
    ),
    "reward_rejected_mean": Metric("mean reward of rejected, or bad, answers", "reward", "down", "falls"),
    "chosen_logp_mean": Metric(
        "mean over chosen answers of log pi(answer), summed over its tokens", "nats/answer", "up", "falls little"
    ),
    "rejected_logp_mean": Metric("the same over rejected answers", "nats/answer", "down", "falls"),
    "kto_point": Metric(
        "max(0, mean log(pi / pi_ref) over strangers: other rows' answers to a row's prompt), KTO's point of reference",
        "nats/answer",
        healthy="0 or a little above",
        reduction="same",
    ),
    "eval/auroc": Metric(
        "chance that a good row is rewarded more than a bad one, ties counting half; pairs: each side a row",
        "share",
        "up",
        "above 0.5",
    ),
    "eval/ece": Metric(
        "sum_b n_b / n |mean sigma(reward) - share of good rows| over 10 bins (arXiv 1706.04599)",
        "share",
        "down",
        "below 0.05; with few rows it cannot be",
    ),
    "eval/brier": Metric("mean (sigma(reward) - label)^2", "1", "down", "below 0.25"),
}

MACHINE = {
    "time/<name>_s": Metric(
        "seconds in one stage since the last record", "s", "down", reduction="max", deterministic=False
    ),
    "episodes_per_second": Metric(
        "trajectories of the step / its seconds", "1/s", "up", reduction="sum", deterministic=False
    ),
    "tokens_per_second": Metric(
        "tokens that the policy chose / seconds of the step", "tokens/s", "up", reduction="sum", deterministic=False
    ),
    "memory_rss_mb": Metric(
        "most resident memory of the process so far", "MB", "down", "flat", "max", deterministic=False
    ),
    "memory_device_mb": Metric(
        "most memory of its CUDA device that the process's tensors took so far; absent without one",
        "MB",
        "down",
        "flat",
        "max",
        deterministic=False,
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
"""Every metric by name; `<name>` stands for a name without a slash, `<k>` for a whole number."""

_HOLES = {"<name>": "[^/]+", "<k>": "[0-9]+"}


def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name)
    for hole, expression in _HOLES.items():
        text = text.replace(re.escape(hole), expression)
    return re.compile(text)


_PATTERNS = {_pattern(name): metric for name, metric in METRICS.items() if "<" in name}


def lookup(name: str) -> Metric:
    """The entry of a metric. KeyError, naming the nearest entry, where there is none.

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


@lru_cache(maxsize=4096)  # asked of every column of every line, and slow for names without an entry
def deterministic(name: str) -> bool:
    """Whether two equal runs agree in this metric. A name without an entry is taken to, so that a difference shows."""
    try:
        return lookup(name).deterministic
    except KeyError:
        return True
