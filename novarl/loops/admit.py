"""Select the scored rollouts to train on, and compute metrics of a rollout phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from novarl.core.errors import NovaError
from novarl.core.types import Record, Rollout, Scored


@dataclass(frozen=True, slots=True)
class Admission:
    """Failed rollouts are never used. With `varied`, groups with all rewards equal are replaced by other prompts
    (dynamic sampling, DAPO, https://arxiv.org/abs/2503.14476), up to `max_refills` times the prompts of a step."""

    varied: bool = False
    max_refills: int = 3
    needs_twin: bool = False

    def missing(self, scored: Sequence[Scored], target: int, *, asked: int) -> int:
        """The number of further prompts to sample after `asked`."""
        if asked == 0:
            return target
        if not self.varied or asked >= target * (1 + self.max_refills):
            return 0
        return max(0, target - len(self._admitted(scored)))

    def keep(self, scored: Sequence[Scored], target: int) -> list[Scored]:
        """The rollouts of the first `target` admitted groups, in prompt order, or of the first usable ones."""
        admitted = self._admitted(scored) or replace(self, varied=False)._admitted(scored)
        chosen = set(admitted[:target])
        kept = [item for item in scored if item.reward is not None and item.rollout.group in chosen]
        if not any(item.rollout.role == "train" for item in kept):
            errors = [item.error for item in scored if item.error]
            first = (errors or ["no rollout was sampled"])[0].partition("\n")[0]  # a traceback may follow it
            raised = any("Traceback" in error for error in errors)
            what = "the reward failed for every rollout of the step"
            if any(item.reward is not None and item.rollout.role == "train" for item in scored):
                what = "no prompt of the step has rewards for both an answer and the greedy baseline"
            raise NovaError(
                f"{what}: {first}",
                where="reward",
                fix="fix the reward function" + "; events.jsonl of the run contains all tracebacks" * raised,
            )
        return kept

    def _admitted(self, scored: Sequence[Scored]) -> list[int]:
        found = []
        for group, members in sorted(_groups(scored).items()):
            rewards = [item.reward for item in members if item.rollout.role == "train" and item.reward is not None]
            twin = any(item.rollout.role == "baseline" and item.reward is not None for item in members)
            if rewards and (twin or not self.needs_twin) and (len(set(rewards)) > 1 or not self.varied):
                found.append(group)
        return found


def _groups(scored: Sequence[Scored]) -> dict[int, list[Scored]]:
    groups: dict[int, list[Scored]] = defaultdict(list)
    for item in scored:
        groups[item.rollout.group].append(item)
    return groups


def describe(scored: Sequence[Scored], kept: Sequence[Scored]) -> Record:
    """Metrics of a rollout phase: `reward_raw_mean` over all rollouts, `reward_mean` over those used."""
    sampled = [item for item in scored if item.rollout.role == "train"]
    raw = [item.reward for item in sampled if item.reward is not None]
    used = [item for item in kept if item.rollout.role == "train"]
    rewards = [item.reward for item in used if item.reward is not None]
    lengths = [sum(sum(sequence.mask) for sequence in item.rollout.sequences) for item in used]
    tokens = [sum(len(sequence.tokens) for sequence in item.rollout.sequences) for item in used]
    groups = _groups(used)
    flat = sum(len({item.reward for item in members}) == 1 for members in groups.values())
    record = {
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        "reward_raw_mean": fmean(raw),
        "zero_variance_groups": float(flat),
        "groups_kept": float(len(groups)),
        "groups_dropped": float(len(_groups(sampled)) - len(groups)),
        "failed_rollouts": float(len(sampled) - len(raw)),
        "truncated_fraction": fmean(item.rollout.status == "truncated" for item in used),
        "length_mean": fmean(lengths),
        "length_max": float(max(lengths)),
        "prompt_tokens": float(sum(tokens) - sum(lengths)),
        "completion_tokens": float(sum(lengths)),
        "episodes": float(len(sampled)),
    }
    turns = [turns_of(item.rollout) for item in used]
    if max(turns) > 1:
        record["turns_mean"] = fmean(turns)
    for name in sorted({name for item in used for name in item.rewards}):
        record[f"rewards/{name}_mean"] = fmean(item.rewards[name] for item in used if name in item.rewards)
    for name in sorted({name for item in sampled for name in item.metrics}):
        record[f"logged/{name}"] = fmean(item.metrics[name] for item in sampled if name in item.metrics)
    return record


def turns_of(rollout: Rollout) -> int:
    """The number of turns of the policy."""
    return int(rollout.info.get("turns", 1))


def in_order(parts: Sequence[Sequence[Scored]], groups: Collection[int]) -> list[Scored]:
    """Merge the ranks' rollouts, sorted by group and sample. Raises RuntimeError for duplicate or missing `groups`."""
    merged = sorted(
        (item for part in parts for item in part),
        key=lambda item: (item.rollout.group, item.rollout.role, item.rollout.index),
    )
    names = [(item.rollout.group, item.rollout.role, item.rollout.index) for item in merged]
    if len(set(names)) != len(names):
        raise RuntimeError("two ranks sampled the same prompt")
    if {group for group, _, _ in names} != set(groups):
        raise RuntimeError("the ranks did not sample all requested prompts")
    return merged
