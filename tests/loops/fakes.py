"""An online run whose sampler, reward and learner are made of plain lists: what the loop does can be read off them."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field

from novarl.core.bus import Bus
from novarl.core.types import Batch, Credit, Prompt, Record, Role, Rollout, Scored, Scores, Sequence, Status
from novarl.distributed.ranks import Ranks
from novarl.learn.credit import CreditRule
from novarl.loops.admit import Admission
from novarl.loops.online import Stages
from novarl.loops.state import Pending

Reward = Callable[[Rollout], float | None]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"row/{row}", (1, 2, row % 7), ({"role": "user", "content": str(row)},)) for row in range(count)]


def rollout(prompt: Prompt, group: int, index: int, *, role: Role = "train", status: Status = "done") -> Rollout:
    """Three tokens of prompt, and one more answer token than its number says."""
    answer = (*(9,) * index, 7)
    tokens = (*prompt.tokens, *answer)
    mask = (False,) * len(prompt.tokens) + (True,) * len(answer)
    logp = tuple(-0.5 if chosen else 0.0 for chosen in mask)
    versions = tuple(0 if chosen else -1 for chosen in mask)
    sequence = Sequence(tokens, mask, logp, (0.0,) * len(tokens), versions)
    return Rollout(prompt, group, index, (sequence,), (), f"{prompt.id} {index}", status=status, role=role)


def scored(item: Rollout, reward: float | None) -> Scored:
    return Scored(item, {} if reward is None else {"r": reward}, reward, None if reward is not None else "no number")


def by_index(item: Rollout) -> float:
    return float(item.index)


@dataclass
class Seen:
    """What went through the stages."""

    asked: list[list[tuple[int, str]]] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    checked: int = 0
    steps: int = 0
    batches: list[Batch] = field(default_factory=list)
    advantages: list[list[float]] = field(default_factory=list)
    kept: list[tuple[int, list[Scored], Pending]] = field(default_factory=list)


class FakeLearner:
    """Notes what it is given, and reports how much that was."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def score(self, batch: Batch) -> Scores:
        return Scores()

    def end_step(self) -> None:
        self.seen.steps += 1

    def update(self, batch: Batch, scores: Scores, credit: Credit) -> Record:
        self.seen.batches.append(batch)
        self.seen.advantages.append(credit.advantage[batch.mask].tolist())
        return {"tokens": float(batch.tokens.numel())}


class FakeGovernor:
    """Governs nothing."""

    kl_coef = 0.0

    def rule(self, learner: FakeLearner) -> None:
        pass

    def weigh(self, batch: Batch, scores: Scores) -> tuple[None, Record]:
        return None, {}

    def observe(self, record: Record) -> Record:
        return {}


def stages(
    seen: Seen,
    *,
    rows: Seq[Prompt],
    reward: Reward = by_index,
    samples: int = 3,
    twin: bool = False,
    estimator: str = "group",
    admission: Admission | None = None,
    ranks: Ranks | None = None,
    prompts_per_rollout: int = 4,
    updates_per_rollout: int = 1,
    epochs_per_rollout: int = 1,
    seed: int = 0,
) -> Stages:
    """The five verbs, faked but for what belongs to the loop itself."""

    def sample(asked: Seq[tuple[int, Prompt]], step: int) -> list[Rollout]:
        seen.asked.append([(group, prompt.id) for group, prompt in asked])
        found = [rollout(prompt, group, index) for group, prompt in asked for index in range(samples)]
        return found + [rollout(prompt, group, 0, role="baseline") for group, prompt in asked if twin]

    def check(batch: Batch, rollouts: Seq[Rollout]) -> Record:
        seen.checked += 1
        return {"mismatch_mean": 0.0}

    return Stages(
        prompts=rows,
        sample=sample,
        score=lambda rollouts: [scored(item, reward(item)) for item in rollouts],
        credit=CreditRule(estimator),
        learner=FakeLearner(seen),  # type: ignore[arg-type]
        governor=FakeGovernor(),  # type: ignore[arg-type]
        supplier=None,
        publish=seen.published.append,
        check=check,
        keep=lambda step, items, pending: seen.kept.append((step, list(items), pending)),
        admission=admission or Admission(),
        ranks=ranks or Ranks(),
        bus=Bus(),
        prompts_per_rollout=prompts_per_rollout,
        updates_per_rollout=updates_per_rollout,
        epochs_per_rollout=epochs_per_rollout,
        seed=seed,
    )
