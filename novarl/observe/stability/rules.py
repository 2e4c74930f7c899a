"""The table of alerts: what each reads, when it speaks, its named cause and what to try.

A check is a pure function of a `Window` of metrics. Thresholds are constants here; `make bench-alarms` measures how
often each is wrong. Checks of plumbing faults read the tokens of a step instead (`plumbing`).
"""

from __future__ import annotations

import math
from functools import partial
from statistics import fmean, median

from novarl.observe.stability.alerts import Rule
from novarl.observe.stability.conditions import CONDITIONS, FLAT, equal_groups
from novarl.observe.stability.faults import PLUMBING
from novarl.observe.stability.window import RECENT, Window

EARLY = 5
"""Steps after which a run without a learning signal is told so."""

FAR = 0.1
"""KL of an update in nats per token: ten times the usual maximum. One update of a small batch may measure more, since
k3 has a heavy tail, so that only a whole run is judged by it."""
ROW, EXPLODED = 0.3, 1.5
"""While a run goes on: three updates in a row above the first, or one above the second."""
AWAY = 3.0
"""Distance to the reference in nats per token (`kl_to_ref`), the mean of four updates."""

CERTAIN, SUNK, UNSURE, RISE = 0.1, 0.25, 1.5, 0.5
"""Entropy as a fraction of its first values: collapsed at the end of a run below the first; while it goes on, and the
reward does not rise, below the second; above the third, and by at least `RISE` nats per token, it is diverging."""

SPIKE, ABOVE = 20.0, 5.0
"""A gradient norm that many times the median, and that many times the maximum, of the updates before."""

DEAD, APART, QUIET = 0.9, 0.5, 0.05
"""Share of groups with identical rewards. And standard deviations of the rewards relative to the first steps: where
prompts differ by more than `APART`, equal groups are not those of a task that was learnt."""

SATURATED = 0.3
"""Share of clipped tokens in the update of a step that clips most, the mean of three steps."""

DIVERGED = 10.0
"""Value loss relative to the largest of the first updates."""

LONGER, SHORTER = 2.0, 0.5
"""Mean length relative to the first steps."""
CUT, WHOLE = 0.5, 0.1
"""Fractions of truncated answers: many now, few at the start."""

WATCHED = (
    "total_loss",
    "policy_loss",
    "loss",
    "grad_norm",
    "kl",
    "entropy",
    "ratio_max",
    "value_loss",
    "value_mean",
    "critic_grad_norm",
    "reward_mean",
    "advantage_std",
)
"""Metrics that are never NaN or infinite in a healthy run."""


def _from_the_start(name: str, window: Window) -> str | None:
    """A condition of `CONDITIONS` over all updates so far."""
    if not window.whole or window.step_count() < EARLY:
        return None
    if window.gained() and not CONDITIONS[name].lasting:
        return None
    condition = CONDITIONS[name]
    least = max(DEAD, condition.least) if name == "no_signal" else condition.least
    held = condition.evidence(window.first, window.limit, least=least) is not None
    return condition.evidence(window.recent, window.limit, least=least) if held else None


def _not_finite(window: Window) -> str | None:
    wrong = [name for name in WATCHED if not math.isfinite(window.now.get(name) or 0.0)]
    return f"{', '.join(f'{name} is {window.now[name]}' for name in wrong)}" if wrong else None


def _kl_explosion(window: Window) -> str | None:
    moves = window.last("kl", 3)
    if moves and moves[-1] > EXPLODED:
        return f"The update moved the policy by {moves[-1]:.2g} nats per token (kl); at most 0.01 is usual"
    if len(moves) == 3 and min(moves) > ROW:
        return f"The last 3 updates moved the policy by {_listed(moves)} nats per token (kl); at most 0.01 is usual"
    away = window.last("kl_to_ref", 4)
    if len(away) == 4 and "kl_sequence" in window.now and fmean(away) > AWAY:
        return f"The policy is {fmean(away):.2g} nats per token from the reference (kl_to_ref); below 1 is usual"
    return None


def _entropy(window: Window) -> tuple[float, float] | None:
    before, after = window.early("entropy", 4), window.last("entropy", 4)
    return (fmean(before), fmean(after)) if len(before) == len(after) == 4 and fmean(before) > 0 else None


def _entropy_collapse(window: Window) -> str | None:
    found = _entropy(window)
    if found is None or found[1] >= SUNK * found[0] or window.gained():
        return None
    return f"The entropy collapsed from {found[0]:.2g} to {found[1]:.2g} nats per token, and the reward did not rise"


def _entropy_rise(window: Window) -> str | None:
    found = _entropy(window)
    if found is None or found[1] <= max(UNSURE * found[0], found[0] + RISE) or window.gained():
        return None
    return f"The entropy rose from {found[0]:.2g} to {found[1]:.2g} nats per token: the policy is diverging"


def _gradient_spike(window: Window) -> str | None:
    before, now = window.last("grad_norm", 32, skip=1), window.now.get("grad_norm", 0.0)
    if len(before) < 8 or not math.isfinite(now):
        return None
    usual = median(before)
    if usual == 0 or now <= SPIKE * usual or now <= ABOVE * max(before):
        return None
    return f"The gradient norm is {now:.3g}, {now / usual:.0f} times the median of the {len(before)} updates before"


def _groups(window: Window, count: int) -> list[float]:
    found = [equal_groups(record) for record in window.steps(count)]
    return [n / m for n, m in (pair for pair in found if pair is not None)]


def _dead_groups(window: Window) -> str | None:
    shares, spread = _groups(window, 4), [record.get("reward_std", 0.0) for record in window.steps(4)]
    alive = [pair for record in window.first if (pair := equal_groups(record)) is not None]
    if len(shares) < 4 or min(shares) < DEAD or not alive or max(spread) == 0.0:
        return None
    before = sum(n for n, _ in alive) / sum(m for _, m in alive)
    apart = fmean(spread) >= APART * fmean(window.early("reward_std", 4) or [0.0])
    if before >= FLAT or (window.gained() and not apart):
        return None
    what = f"{fmean(shares):.0%} of the groups of the last 4 steps have identical rewards, {before:.0%} at the start"
    return f"{what}; rewards of different prompts still differ"


def _variance_collapse(window: Window) -> str | None:
    spread = [record["reward_std"] for record in window.steps(4) if "reward_std" in record]
    before = window.early("reward_std", 4)
    if len(spread) < 4 or window.step_count() < EARLY or not before or max(before) == 0 or window.gained():
        return None
    if max(spread) >= QUIET * fmean(before):
        return None
    what = f"The standard deviation of the rewards fell from {fmean(before):.2g} to {fmean(spread):.2g} (reward_std)"
    return f"{what}, and their mean did not rise"


def _clip_saturation(window: Window) -> str | None:
    shares: dict[float, float] = {}
    for record in window.recent:
        if (share := record.get("clip_fraction")) is not None:
            shares[record["step"]] = max(share, shares.get(record["step"], 0.0))
    last = list(shares.values())[-3:]
    if len(last) < 3 or fmean(last) <= SATURATED:
        return None
    return f"{fmean(last):.0%} of the tokens of the last 3 steps were clipped and have no gradient (clip_fraction)"


def _value_divergence(window: Window) -> str | None:
    before, after = window.early("value_loss"), window.last("value_loss", 3)
    if len(before) < 8 or len(after) < 3:
        return None
    # While all rewards are 0, so is the loss of an untrained critic: it counts as at least the variance of the rewards.
    usual = max(*before, *(spread**2 / 2.0 for spread in (0.0, *window.last("reward_std", RECENT))))
    if usual == 0.0 or min(after) <= DIVERGED * usual:
        return None
    times = f"{min(after) / usual:.0f} times its largest value in the first {len(before)} updates"
    return f"The value loss rose to {min(after):.3g}, {times} (value_loss)"


def _length_drift(window: Window) -> str | None:
    before = window.early("length_mean", 4)
    after = [record["length_mean"] for record in window.steps(3) if "length_mean" in record]
    if not before or len(after) < 3 or window.step_count() < EARLY:
        return None
    cut = fmean(record.get("truncated_fraction", 0.0) for record in window.steps(3))
    if cut >= CUT and fmean(window.early("truncated_fraction", 4) or [1.0]) <= WHOLE:
        return f"{cut:.0%} of the answers are now truncated (truncated_fraction): the reward may favour length"
    if min(after) > LONGER * fmean(before) or max(after) < SHORTER * fmean(before):
        change = f"from {fmean(before):.3g} to {fmean(after):.3g} tokens (length_mean)"
        return f"The mean length of the answers went {change}: the reward may depend on it"
    return None


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2g}" for value in values)


TRAINING = (
    Rule(
        "no_signal",
        "setup",
        "Equal rewards: no answer is better than another",
        ("zero_variance_groups", "groups_kept", "reward_std"),
        f"at least {DEAD:.0%} of all groups have identical rewards, from the start; {FLAT:.0%} at the end of a run "
        "whose score did not rise",
        "Inspect the answers in rollouts/. Usual fixes: an easier task, a reward with partial credit, supervised "
        "training first (warmup=N on a built-in task, or novarl sft), or more responses_per_prompt",
        history=EARLY,
        severity="critical",
        check=partial(_from_the_start, "no_signal"),
    ),
    Rule(
        "always_cut",
        "setup",
        "The length limit is too low",
        ("truncated_fraction",),
        "at least 90% of all answers are truncated, from the start",
        "Usual fix: a larger max_new_tokens. Built-in models use byte-level tokens: a word takes about six tokens",
        history=EARLY,
        severity="critical",
        check=partial(_from_the_start, "always_cut"),
    ),
    Rule(
        "no_gradient",
        "setup",
        "No update changes the weights",
        ("grad_norm",),
        "the gradient is 0 in at least half of all updates, from the start",
        "Usual fixes: a reward that tells answers to the same prompt apart, several answers per prompt "
        "(responses_per_prompt), or rows with tokens to train on",
        history=EARLY,
        severity="critical",
        check=partial(_from_the_start, "no_gradient"),
    ),
    Rule(
        "low_lr",
        "setup",
        "The learning rate is too low for the number of updates",
        ("lr",),
        "all updates together move a weight less than one update at the default rate; at the end of a run, than ten",
        "Usual fixes: the default (remove learning_rate) or more steps",
        severity="critical",
    ),
    Rule(
        "nan",
        "training",
        "A number that is not finite",
        WATCHED,
        "any of these is NaN or infinite",
        "Usual fixes: dtype=float32, a lower optim.lr, and a reward that returns finite numbers",
        severity="critical",
        check=_not_finite,
    ),
    Rule(
        "kl_explosion",
        "training",
        "Updates are too large: the policy moves to where its samples carry no information",
        ("kl", "kl_to_ref"),
        f"kl above {EXPLODED:g} in one update or above {ROW:g} in three in a row; or kl_to_ref above {AWAY:g} on the "
        "average of four, in runs with a reference",
        "Usual fixes: the default optim.lr, or a third of it; smaller clip.low and clip.high; a larger kl.coef",
        severity="critical",
        check=_kl_explosion,
    ),
    Rule(
        "entropy_collapse",
        "training",
        "The policy became certain of answers that earn no more",
        ("entropy", "reward_mean"),
        f"the mean of four updates is below {SUNK:.0%} of the first four, and the reward did not rise",
        "Usual fixes: a lower optim.lr, entropy.coef or kl.type=loss; start again from an earlier checkpoint",
        history=8,
        severity="critical",
        check=_entropy_collapse,
    ),
    Rule(
        "entropy_rise",
        "training",
        "The policy is diverging, or the entropy bonus outweighs the reward",
        ("entropy", "reward_mean"),
        f"the mean of four updates is above {UNSURE:g} times the first four and by more than {RISE:g} nats, and the "
        "reward did not rise",
        "Usual fixes: entropy.coef=0, a lower optim.lr",
        history=8,
        check=_entropy_rise,
    ),
    Rule(
        "gradient_spike",
        "training",
        "One batch has a gradient out of proportion",
        ("grad_norm",),
        f"above {SPIKE:g} times the median and {ABOVE:g} times the maximum of up to 32 updates before",
        "Inspect the step's rewards and advantages in rollouts/. Usual fixes: optim.max_grad_norm, a bounded reward, a "
        "lower optim.lr",
        history=9,
        check=_gradient_spike,
    ),
    Rule(
        "dead_groups",
        "training",
        "The answers to a prompt all earn the same, although prompts differ",
        ("zero_variance_groups", "groups_kept", "reward_std"),
        f"at least {DEAD:.0%} of the groups in each of four steps, below {FLAT:.0%} at the start, reward_std above 0, "
        f"and the reward did not rise, or reward_std is still at least {APART:.0%} of the first",
        "Usual fixes: algo=dapo or dynamic_sampling.enabled=true, more responses_per_prompt, a reward that depends on "
        "the answer and not on the prompt alone",
        history=8,
        check=_dead_groups,
    ),
    Rule(
        "reward_variance_collapse",
        "training",
        "All rewards became equal",
        ("reward_std", "reward_mean"),
        f"reward_std of four steps below {QUIET:.0%} of the first, and the mean did not rise",
        "Inspect the answers in rollouts/: the reward is saturated or constant, or all answers are the same",
        history=EARLY,
        severity="critical",
        check=_variance_collapse,
    ),
    Rule(
        "clip_saturation",
        "training",
        "Most tokens are clipped: too many or too large updates on one rollout",
        ("clip_fraction",),
        f"above {SATURATED:.0%} on the average of three steps, each counted by its update that clips most",
        "Usual fixes: fewer updates_per_rollout, a lower optim.lr, larger clip.low and clip.high",
        history=8,
        check=_clip_saturation,
    ),
    Rule(
        "value_divergence",
        "training",
        "The critic diverges, so advantages are noise",
        ("value_loss",),
        f"three updates in a row above {DIVERGED:g} times the largest of the first eight",
        "Usual fixes: a lower critic.lr, critic.clip=0.2, rewards of a bounded size",
        history=11,
        severity="critical",
        check=_value_divergence,
    ),
    Rule(
        "length_drift",
        "training",
        "Answers become much longer or shorter",
        ("length_mean", "truncated_fraction"),
        f"three steps in a row above {LONGER:g} times or below {SHORTER:g} times the first four; or {CUT:.0%} of the "
        f"answers truncated, at most {WHOLE:.0%} at the start",
        "Read the answers in rollouts/. Usual fixes: a length penalty, another reward, reward.<name>.weight",
        history=EARLY,
        check=_length_drift,
    ),
)
"""Alerts about metrics, in the order in which they are reported."""

READ = frozenset(
    {name for rule in TRAINING for name in rule.reads} | {"step", "episodes", "groups_dropped", "kl_sequence"}
)
"""Every metric that a rule reads."""

RULES = {rule.name: rule for rule in (*TRAINING, *PLUMBING)}
"""Every alert by name."""
