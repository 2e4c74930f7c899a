"""Two ranks, each of which holds half of every weight, learn what one process learns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from novarl.algos.surrogates import gspo, ppo_clip
from novarl.core.errors import NovaError
from novarl.core.types import Record
from novarl.data.pack import pack, pack_sequences
from novarl.distributed.ranks import Ranks
from novarl.distributed.shard import full, is_sharded, shard
from novarl.learn.credit import CreditRule
from novarl.learn.objective import Objective
from novarl.learn.optim import Optimizer, OptimSettings
from novarl.learn.plan import plan, trajectory_of_tokens
from novarl.learn.policy import PolicyLearner
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import SupervisedLearner
from novarl.models.load import Policy, load, save
from novarl.run.publish import link
from tests.distributed.fork import run
from tests.invariance import sharp
from tests.invariance.gradients import objective
from tests.invariance.sharp import fresh, lessons, perturbed, recorded, sharp_policy

LR = 1e-3
UPDATES = 4
BUDGET = 60
"""Tokens: ranks then have several micro-batches, and not all as many."""
Weights = dict[str, Tensor]
Learnt = tuple[Weights, Weights, list[Record]]
"""The gradient of the first update, the weights after the last one, and the records."""


def spread_out(policy: Policy, ranks: Ranks) -> None:
    """Shard the model, where there are ranks to shard it over."""
    if ranks.size > 1:
        shard(policy.model, list(policy.model.model.layers), ranks)
        assert all(is_sharded(parameter) for parameter in policy.model.parameters())


def weights(model: nn.Module) -> Weights:
    return {name: full(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def caught(optimizer: Optimizer) -> Weights:
    """The gradient of the next update will be in the result."""
    found: Weights = {}
    step = optimizer.step

    def look() -> tuple[float, float]:
        optimizer.gradients()
        if not found:
            found.update({name: full(p.grad).clone() for name, p in optimizer.parameters.items() if p.grad is not None})
        return step()

    optimizer.step = look  # type: ignore[method-assign]
    return found


def imitate(ranks: Ranks, seed: int = 0) -> Learnt:
    """Supervised fine-tuning, on an odd number of rows."""
    policy = fresh(seed)
    spread_out(policy, ranks)
    learner = SupervisedLearner(
        policy.model, Scorer(policy.model, chunk=64), optim=OptimSettings(lr=LR), ranks=ranks, budget=BUDGET
    )
    gradient = caught(learner.optimizer)
    records = [learner.update(pack_sequences(lessons()[update % 2 :: 2][:7])) for update in range(UPDATES)]
    return gradient, weights(policy.model), records


EVERYTHING = objective("token")


def reinforce(ranks: Ranks, seed: int = 0, objective: Objective = EVERYTHING) -> Learnt:
    """Policy gradients on recorded answers of different lengths."""
    policy = sharp_policy()
    reference = perturbed(policy.model, 0.1)
    spread_out(policy, ranks)
    scorer = Scorer(policy.model, chunk=64)
    learner = PolicyLearner(
        policy.model,
        scorer,
        objective=objective,
        optim=OptimSettings(lr=LR),
        ranks=ranks,
        budget=BUDGET,
        reference=replace(scorer, model=reference),
        needs_old_logp=True,
    )
    gradient = caught(learner.optimizer)
    batches = [pack(recorded(step=step + 2 * seed)) for step in range(2)]
    scores = [learner.score(batch) for batch in batches]
    records = []
    for update in range(UPDATES):
        batch, known = batches[update % 2], scores[update % 2]
        credit, _, _ = CreditRule("group", {"norm_std": True})(batch, known, None)
        records.append(learner.update(batch, known, credit))
    return gradient, weights(policy.model), records


def largest(mine: Weights, theirs: Weights) -> float:
    return max(float((mine[name] - theirs[name]).abs().max()) for name in theirs)


GRPO = Objective(
    surrogate=partial(ppo_clip, clip_low=0.2, clip_high=0.2), aggregation="token", constant=1.0, proportional=True
)
GSPO = Objective(
    surrogate=partial(gspo, clip_low=0.2, clip_high=0.2),
    aggregation="sequence",
    constant=1.0,
    by_sequence=frozenset({"surrogate"}),
)
KINDS = {
    "sft": imitate,
    "everything": reinforce,
    "grpo": partial(reinforce, objective=GRPO),
    "gspo": partial(reinforce, objective=GSPO),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_weights_are_those_of_one_process(kind: str) -> None:
    learn = KINDS[kind]
    gradient, alone, records = learn(Ranks())
    (first, mine, said), (second, theirs, said_too) = run(learn)
    start = weights((fresh() if kind == "sft" else sharp_policy()).model)
    assert all(largest({name: alone[name]}, {name: start[name]}) > 0.1 * LR for name in alone), "the weights must move"
    other = learn(Ranks(), seed=1)
    assert largest(other[0], gradient) > 1e-4 and largest(other[1], alone) > LR, "another seed must give other weights"
    assert all(torch.equal(first[name], second[name]) and torch.equal(mine[name], theirs[name]) for name in alone)
    assert largest(first, gradient) < 1e-6, largest(first, gradient)
    assert largest(mine, alone) <= 0.05 * LR, largest(mine, alone)
    assert said == said_too
    assert any(record["micro_batches"] % 2 for record in said), "one rank must have more micro-batches than the other"
    for one, two in zip(records, said, strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - {"kl", "micro_batches"}:
            assert two[name] == pytest.approx(one[name], rel=2e-3, abs=2e-5), name


def rested(ranks: Ranks) -> Learnt:
    """An update in which one rank has nothing but answers without an advantage, which need no backward pass."""
    policy = sharp_policy()
    spread_out(policy, ranks)
    scorer = Scorer(policy.model, chunk=64)
    learner = PolicyLearner(
        policy.model, scorer, objective=GRPO, optim=OptimSettings(lr=LR), ranks=ranks, budget=10_000
    )
    gradient = caught(learner.optimizer)
    batch = pack(recorded()[:8])
    shares = [plan(batch, Ranks(rank, 2), 10_000) for rank in range(2)]
    assert any(all(trajectory >= 4 for micro in share for trajectory in micro) for share in shares)
    known = learner.score(batch)
    credit, _, _ = CreditRule("group", {"norm_std": True})(batch, known, None)
    advantage = torch.where(trajectory_of_tokens(batch) < 4, credit.advantage, 0.0)
    record = learner.update(batch, known, replace(credit, advantage=advantage))
    return gradient, weights(policy.model), [record]


def test_a_rank_without_a_gradient_takes_part() -> None:
    gradient, alone, _ = rested(Ranks())
    (first, mine, _), (second, _, _) = run(rested)
    assert float(gradient["model.norm.weight"].abs().max()) > 0.0
    assert largest(first, gradient) < 1e-6 and largest(second, gradient) < 1e-6
    assert largest(mine, alone) <= 0.05 * LR


def idle(ranks: Ranks) -> tuple[float, float]:
    """After an update without any backward pass, which Adam's moments alone make: how far the weights moved, and how
    far the sharded model's log-probabilities are from those of a plain model with the optimiser's weights."""
    policy = sharp_policy()
    spread_out(policy, ranks)
    scorer = Scorer(policy.model, chunk=64)
    learner = PolicyLearner(policy.model, scorer, objective=GRPO, optim=OptimSettings(lr=LR), ranks=ranks, budget=60)
    batch = pack(recorded())
    known = learner.score(batch)
    credit, _, _ = CreditRule("group", {"norm_std": True})(batch, known, None)
    learner.update(batch, known, credit)
    before = weights(policy.model)
    learner.update(batch, known, replace(credit, advantage=torch.zeros_like(credit.advantage)))
    mine = scorer.logprobs(batch, ranks, 60)
    plain = sharp_policy().model
    for name, parameter in plain.named_parameters():
        parameter.data = full(learner.optimizer.parameters[name].detach())
    whole = replace(scorer, model=plain).logprobs(batch, Ranks(), 60)
    return largest(weights(policy.model), before), float((mine - whole).abs().max())


def test_weights_that_move_without_a_backward_pass_are_seen() -> None:
    for moved, apart in run(idle):
        assert moved > 0.1 * LR and apart < 1e-5


def exhausted(ranks: Ranks, where: str, every_time: bool) -> tuple[Weights, Record] | str:
    """One update in which memory runs out on rank 1, in a forward or in a backward pass of its second layer."""
    policy = sharp_policy()
    spread_out(policy, ranks)
    learner = SupervisedLearner(
        policy.model, Scorer(policy.model, chunk=64), optim=OptimSettings(lr=LR), ranks=ranks, budget=BUDGET
    )
    passes = [0]

    def fail(*_: Any) -> None:
        passes[0] += 1
        if ranks.rank == 1 and (passes[0] == 2 or every_time):
            raise torch.OutOfMemoryError("out of memory")

    layer = policy.model.model.layers[1]
    if where == "forward":
        layer.register_forward_pre_hook(fail)
    else:
        layer.register_forward_hook(lambda _module, _args, output: output.register_hook(fail) and None)
    gradient = caught(learner.optimizer)
    try:
        record = learner.update(pack_sequences(lessons()))
    except NovaError as error:
        return error.what
    return gradient, record


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_all_ranks_begin_again_where_memory_runs_out_on_one(where: str) -> None:
    alone = exhausted(Ranks(), where, False)
    first, second = run(exhausted, where, False)
    assert not isinstance(alone, str) and "split_micro_batches" not in alone[1]
    for gradient, record in (first, second):
        assert record["split_micro_batches"] == 1.0
        assert largest(gradient, alone[0]) < 1e-6
        assert record["loss"] == pytest.approx(alone[1]["loss"], rel=1e-5)


def test_all_ranks_give_up_where_one_cannot_go_on() -> None:
    assert all("memory" in said for said in run(exhausted, "forward", True))


def carried(ranks: Ranks, folder: Path) -> tuple[Weights, Weights]:
    """Weights after four updates: in one go; and with everything written after two, and read by a new learner."""

    def learner_on(policy: Policy, ranks: Ranks) -> SupervisedLearner:
        spread_out(policy, ranks)
        scorer = Scorer(policy.model, chunk=64)
        return SupervisedLearner(policy.model, scorer, optim=OptimSettings(lr=LR), ranks=ranks, budget=BUDGET)

    policy, batch = fresh(), pack_sequences(lessons())
    learner = learner_on(policy, ranks)
    for update in range(UPDATES):
        if update == UPDATES // 2:
            save(policy, folder)
            torch.save(learner.state_dict(), folder / f"state-{ranks.rank}")
            ranks.wait()
        learner.update(batch)
    read = load(str(folder))
    later = learner_on(read, ranks)
    later.load_state_dict(torch.load(folder / "state-0"))
    for _ in range(UPDATES // 2):
        later.update(batch)
    return weights(policy.model), weights(read.model)


def test_what_is_saved_goes_on_bit_by_bit_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    (whole, resumed), _ = run(carried, tmp_path)
    assert largest(whole, weights(fresh().model)) > LR
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    alone = load(str(tmp_path))
    learner = SupervisedLearner(
        alone.model, Scorer(alone.model, chunk=64), optim=OptimSettings(lr=LR), ranks=Ranks(), budget=BUDGET
    )
    learner.load_state_dict(torch.load(tmp_path / "state-1"))
    for _ in range(UPDATES // 2):
        learner.update(pack_sequences(lessons()))
    assert largest(weights(alone.model), whole) <= 0.05 * LR


def sampled(ranks: Ranks) -> tuple[list[str], list[str]]:
    """Answers before an update and after it; ranks ask for different numbers of them."""
    policy = sharp_policy()
    spread_out(policy, ranks)
    sampler = sharp.sampler(policy, temperature=0.7)
    learner = SupervisedLearner(
        policy.model, Scorer(policy.model), optim=OptimSettings(lr=0.1), ranks=ranks, budget=BUDGET
    )
    found = []
    for version in range(2):
        link(policy.model, sampler.engine)(version)
        asked = list(enumerate(sharp.prompts()))
        mine = sampler.train(asked[: 1 + 3 * ranks.rank] if ranks.size > 1 else asked[:4], 0)
        assert {v for one in mine for part in one.sequences for v in part.versions if v >= 0} == {version}
        found.append([one.text for one in mine])
        learner.update(pack_sequences(lessons()))
    return found[0], found[1]


def test_sampling_uses_the_published_weights_whatever_the_ranks_ask_for() -> None:
    before, after = sampled(Ranks())
    assert before != after
    (few, few_later), (more, _) = run(sampled)
    assert more == before and few == before[: len(few)] and few_later != few
