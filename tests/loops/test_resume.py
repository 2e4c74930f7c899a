"""A run stopped at any yield, saved, and built anew from the disk goes on as if nothing had happened, to the bit.

The parts are the real ones, on the small trained model: engine, sampler, credit, learner, reference, checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from novarl.control.controllers import DeadBand, Fixed
from novarl.control.governor import Governor
from novarl.core.bus import Bus
from novarl.core.checkpoint import Checkpoint, Checkpoints
from novarl.core.types import Batch, Record, Rollout
from novarl.distributed.ranks import Ranks
from novarl.learn.agreement import TOLERANCES, mismatch
from novarl.learn.credit import CreditRule
from novarl.learn.critic import Critic, ValueScorer
from novarl.learn.optim import OptimSettings
from novarl.learn.policy import PolicyLearner
from novarl.learn.prime import ProcessRewards
from novarl.learn.scorer import Scorer
from novarl.learn.supplier import Supplier
from novarl.learn.vine import Continuations
from novarl.loops.admit import Admission
from novarl.loops.online import Stages, online
from novarl.loops.state import LoopState
from novarl.models.heads import with_head
from novarl.models.load import Policy, load, save
from novarl.models.reference import frozen_copy
from novarl.run.continuations import Continue
from novarl.run.sampler import Sampler
from tests.invariance.gradients import objective
from tests.invariance.sharp import prompts, sampler, score, sharp_policy

STEPS = 3
YIELDS = 6
Trace = list[tuple[Record, dict[str, Tensor]]]


@dataclass
class Run:
    """A run's parts, built as `novarl rl` builds them, on the weights of `policy`."""

    policy: Policy
    learner: PolicyLearner
    stages: Stages
    state: LoopState

    def parts(self) -> dict[str, Any]:
        """Whatever of a run has a state."""
        found = {"loop": self.state, "learner": self.learner, "governor": self.stages.governor}
        return found | ({} if self.stages.supplier is None else {"supplier": self.stages.supplier})

    def snapshot(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts().items()}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, part in self.parts().items():
            part.load_state_dict(state[name])

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.policy.model.named_parameters()}


def critic(policy: Policy, asking: Sampler) -> Supplier:
    optim = OptimSettings(lr=3e-3, schedule="cosine", total_steps=2 * YIELDS)
    settings: dict[str, Any] = {"passes": 2, "clip": 0.2, "bootstrap": True}
    scorer = ValueScorer(with_head(policy.model, separate=True))
    return Critic(scorer, optim=optim, ranks=Ranks(), budget=100, **settings)


def continuations(policy: Policy, asking: Sampler) -> Supplier:
    """Two from the beginning of each word."""
    judge: Any = SimpleNamespace(score=score)
    estimate = Continue(asking, judge, samples=2, max_tokens=16, ends=policy.eos_ids, apply_chat_template=True)
    return Continuations(estimate, policy.tokenizer.decode, split=" ", most=4, ranks=Ranks())


def process_rewards(policy: Policy, asking: Sampler) -> Supplier:
    model = frozen_copy(policy.model).requires_grad_(True)
    optim = OptimSettings(lr=1e-3)
    return ProcessRewards(Scorer(model, chunk=64), beta=0.5, threshold=0.5, optim=optim, ranks=Ranks(), budget=100)


SUPPLIERS = {"PPO": critic, "VinePPO": continuations, "PRIME": process_rewards}


def build(
    policy: Policy, rule: CreditRule, seed: int = 0, varied: bool = False, name: str = "", **sampling: Any
) -> Run:
    asking = sampler(policy, seed=seed, **sampling)
    scorer = Scorer(policy.model, chunk=64)
    learner = PolicyLearner(
        policy.model,
        scorer,
        objective=objective("token"),
        optim=OptimSettings(lr=3e-3, schedule="cosine", warmup_steps=2, total_steps=YIELDS, weight_decay=0.01),
        ranks=Ranks(),
        budget=100,
        reference=Scorer(sharp_policy().model, chunk=64),
        needs_old_logp=True,
    )

    def check(batch: Batch, rollouts: object) -> Record:
        record, fine = mismatch(scorer.logprobs(batch, Ranks(), 100), batch, TOLERANCES[torch.float32])
        assert fine
        return record

    stages = Stages(
        prompts=prompts(),
        sample=asking.train,
        score=score,
        credit=rule,
        learner=learner,
        governor=Governor(DeadBand(coef=0.1, target=1e-4), Fixed(coef=0.01), in_loss=True),
        supplier=SUPPLIERS[name](policy, asking) if name in SUPPLIERS else None,
        publish=partial(asking.engine.publish, None),
        check=check,
        keep=lambda step, scored, pending: None,
        admission=Admission(varied=varied),
        ranks=Ranks(),
        bus=Bus(),
        prompts_per_rollout=4,
        updates_per_rollout=2,
        epochs_per_rollout=1,
        seed=seed,
    )
    return Run(policy, learner, stages, LoopState())


def follow(run: Run) -> Trace:
    return [(record, run.weights()) for record in online(run.state, run.stages, steps=STEPS)]


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


RULES = {
    "group and KL": CreditRule("group", {"norm_std": True}),
    "moving average": CreditRule("ema", kl_type="reward", kl_coef=0.05),
    "dynamic sampling": CreditRule("leave_one_out"),
    "PPO": CreditRule("gae", whiten=True),
    "VinePPO": CreditRule("gae", options={"lam": 0.0}),
    "PRIME": CreditRule("prime"),
}


@pytest.mark.parametrize("name", RULES)
def test_every_yield_is_resumable(name: str, tmp_path: Path) -> None:
    rule, varied = RULES[name], name == "dynamic sampling"
    checkpoints = Checkpoints(tmp_path, keep=YIELDS)
    saved: list[Checkpoint] = []
    whole: Trace = []
    run = build(sharp_policy(), rule, varied=varied, name=name)
    for number, record in enumerate(online(run.state, run.stages, steps=STEPS)):
        # What is saved before and after must not depend on the saving.
        write = partial(save, run.policy)
        saved.append(checkpoints.save(f"yield-{number}", run.snapshot(), write, order=number))
        whole.append((record, run.weights()))
    assert len(whole) == YIELDS
    assert [checkpoint.load()["loop"]["pending"] is not None for checkpoint in saved] == [True, False] * STEPS

    undisturbed = follow(build(sharp_policy(), rule, varied=varied, name=name))
    assert all(one == two and same(a, b) for (one, a), (two, b) in zip(whole, undisturbed, strict=True))
    start = {name: parameter.detach() for name, parameter in sharp_policy().model.named_parameters()}
    weights = [start, *(weights for _, weights in whole)]
    assert not any(same(before, after) for before, after in pairwise(weights))
    other = follow(build(sharp_policy(), rule, seed=1, varied=varied, name=name))
    assert not same(other[-1][1], whole[-1][1]) and other[0][0] != whole[0][0]

    for number, checkpoint in enumerate(saved):
        again = build(load(str(checkpoint.model)), rule, varied=varied, name=name)
        again.load(checkpoint.load())
        assert same(again.weights(), whole[number][1])
        rest = follow(again)
        assert [record for record, _ in rest] == [record for record, _ in whole[number + 1 :]], f"after yield {number}"
        assert same(rest[-1][1] if rest else again.weights(), whole[-1][1]), f"after yield {number}"


def forget_moments(state: dict[str, Any]) -> None:
    state["learner"]["optimizer"]["moments"] = {}


def forget_critic(state: dict[str, Any]) -> None:
    """The critic's moments and schedule start again."""
    state["supplier"]["optimizer"] |= {"moments": {}, "update": 0}


def forget_coefficient(state: dict[str, Any]) -> None:
    state["governor"]["kl"] = {"coef": 0.1}


def forget_rollout(state: dict[str, Any]) -> None:
    """Sample anew what was being learnt from."""
    state["loop"]["pending"] = None


def forget_place(state: dict[str, Any]) -> None:
    state["loop"]["stream"] = {}


def forget_update(state: dict[str, Any]) -> None:
    """The schedule starts again."""
    state["learner"]["optimizer"]["update"] = 0


FAULTS = (forget_moments, forget_critic, forget_coefficient, forget_rollout, forget_place, forget_update)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_state_that_lacks_something_is_caught(fault: Any, tmp_path: Path) -> None:
    rule = RULES["PPO"]
    run = build(sharp_policy(), rule, name="PPO")
    saved: Checkpoint | None = None
    for number, _ in enumerate(online(run.state, run.stages, steps=STEPS)):
        if number == 2:
            saved = Checkpoints(tmp_path, keep=1).save("third", run.snapshot(), partial(save, run.policy), order=3)
    assert saved is not None
    again = build(load(str(saved.model)), rule, name="PPO")
    state = saved.load()
    fault(state)
    again.load(state)
    assert not same(follow(again)[-1][1], run.weights())


def test_each_rollout_is_sampled_by_the_weights_of_its_time() -> None:
    """Two updates to a step: the versions in the batches are 0, 2, 4."""
    run = build(sharp_policy(), RULES["group and KL"])
    versions: list[set[int]] = []
    sample = run.stages.sample

    def spy(asked: Any, step: int) -> list[Rollout]:
        rollouts = sample(asked, step)
        versions.append({v for item in rollouts for sequence in item.sequences for v in sequence.versions if v >= 0})
        return rollouts

    run.stages = replace(run.stages, sample=spy)
    follow(run)
    assert versions == [{0}, {2}, {4}]
