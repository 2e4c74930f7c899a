"""The governor moves what it should, by what was measured, and goes on from a checkpoint exactly."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from novarl.control.constraints import Lagrangian, QuadraticPenalty
from novarl.control.controllers import DeadBand, EntropyTarget, Fixed
from novarl.control.governor import Governor
from novarl.control.objectives import Objective, Objectives
from novarl.core.errors import NovaError
from novarl.core.types import Batch, Record, Scored, Scores
from novarl.data.pack import pack
from novarl.learn.plan import trajectory_of_tokens
from tests.invariance.gradients import objective
from tests.loops.fakes import prompts, rollout

FAR: Record = {"episodes": 8.0, "entropy": 0.5, "kl_mean": 0.4, "kl_sequence": 2.0}


def governor(**given: Any) -> Governor:
    return Governor(
        **{"kl": DeadBand(coef=0.1, target=0.1, speed=1.5), "entropy": Fixed(coef=0.01), "in_loss": True, **given}
    )


def ruled(by: Governor) -> tuple[float, float]:
    """(KL, entropy) coefficients that the learner is given."""
    learner = SimpleNamespace(objective=objective("token"))
    by.rule(learner)  # type: ignore[arg-type]
    return learner.objective.kl_loss_coef, learner.objective.entropy_coef


def test_the_controller_moves_the_learners_coefficient() -> None:
    mine = governor()
    assert ruled(mine) == (0.1, 0.01)
    assert mine.observe(FAR) == {}
    assert ruled(mine) == (pytest.approx(0.15), 0.01)
    mine.observe({**FAR, "kl_mean": 0.01})
    assert mine.kl_coef == pytest.approx(0.1)


def test_credit_takes_the_coefficient_where_kl_is_in_the_reward() -> None:
    mine = governor(in_loss=False)
    mine.observe(FAR)
    assert ruled(mine)[0] == 0.0 and mine.kl_coef == pytest.approx(0.15)


def test_the_unit_of_kl() -> None:
    """2 nats an answer are within a band about 2, 0.4 a token are not."""
    per_sequence = governor(kl=DeadBand(coef=0.1, target=2.0, speed=1.5), unit="sequence")
    per_token = governor(kl=DeadBand(coef=0.1, target=2.0, speed=1.5), unit="token")
    for mine in (per_sequence, per_token):
        mine.observe(FAR)
    assert per_sequence.kl_coef == 0.1 and per_token.kl_coef == pytest.approx(0.1 / 1.5)


def test_multipliers_are_added_to_the_coefficients() -> None:
    """KL 0.4 is 0.1 above its limit, entropy 0.5 is 0.3 below its own: penalties of 10 times that."""
    kl, entropy = (
        QuadraticPenalty(sense="max", limit=0.3, weight=10),
        QuadraticPenalty(sense="min", limit=0.8, weight=10),
    )
    mine = governor(kl=Fixed(coef=0.2), constraints={"kl": kl, "entropy": entropy})
    assert ruled(mine) == (0.2, 0.01)
    found = mine.observe(FAR)
    assert found == {
        "kl_multiplier": pytest.approx(1.0),
        "kl_violation": pytest.approx(0.1),
        "entropy_multiplier": pytest.approx(3.0),
        "entropy_violation": pytest.approx(0.3),
    }
    assert ruled(mine) == (pytest.approx(1.2), pytest.approx(3.01))


def test_the_entropy_is_held_at_its_target() -> None:
    """0.5 nats are half of 1: the bonus grows by e^(rate / 2); at 2 nats it shrinks by the most it may, and a new
    governor goes on from the checkpoint."""
    mine, other = (governor(entropy=EntropyTarget(coef=0.01, target=1.0, rate=0.1)) for _ in range(2))
    mine.observe(FAR)
    assert ruled(mine)[1] == pytest.approx(0.01 * math.exp(0.05))
    other.load_state_dict(json.loads(json.dumps(mine.state_dict())))
    for governed in (mine, other):
        governed.observe({**FAR, "entropy": 2.0})
    assert ruled(mine)[1] == ruled(other)[1] == pytest.approx(0.01 * math.exp(-0.05))


def test_nothing_is_measured_of_a_frozen_actor() -> None:
    mine = governor(constraints={"entropy": Lagrangian(sense="min", limit=0.8)})
    before = mine.state_dict()
    assert mine.observe({"episodes": 8.0}) == {} and mine.state_dict() == before


def test_without_a_reference_kl_stays_and_the_rest_goes_on() -> None:
    mine = governor(constraints={"entropy": QuadraticPenalty(sense="min", limit=0.8, weight=1)})
    mine.observe({"episodes": 8.0, "entropy": 0.5, "kl_mean": 9.0})
    assert mine.kl_coef == 0.1 and mine.entropy_coef == pytest.approx(0.31)


def batch(named: str = "right", scale: float = 1.0) -> Batch:
    """Two groups of answers of 1, 2, 3 tokens, worth 0, 1, 2 times `scale`, and a greedy twin."""
    rows = prompts(2)
    items = [rollout(prompt, group, index) for group, prompt in enumerate(rows) for index in range(3)]
    twin = rollout(rows[0], 0, 0, role="baseline")
    return pack([Scored(item, {named: scale * item.index}, 10.0 * item.index) for item in [*items, twin]])


def objectives(**directions: str) -> Objectives:
    return Objectives([Objective(name, way) for name, way in directions.items()])  # type: ignore[arg-type]


def test_objectives_weigh_the_rewards_by_hand() -> None:
    """Right 0, 1, 2 and lengths 1, 2, 3 vary alike: one up and one down cancel but for a constant."""
    mine = governor(objectives=objectives(right="max", length="min"))
    weighed, record = mine.weigh(batch(), Scores())
    deviation = (2 / 3) ** 0.5
    ways = {name: record[f"objective/{name}_weight"] for name in ("right", "length")}
    assert ways == {"right": pytest.approx(1 / deviation), "length": pytest.approx(-1 / deviation)}
    assert record["objective/right_mean"] == 1.0 and record["objective/length_mean"] == 2.0
    assert weighed is not None and weighed[:6].tolist() == pytest.approx([-1 / deviation] * 6, abs=1e-6)
    assert governor().weigh(batch(), Scores()) == (None, {})


def test_kl_entropy_and_reward_as_objectives() -> None:
    """log pi_old = -1 and log pi_ref = -1.5 for every token: KL 0.5 a token, entropy 1, of 1, 2, 3 tokens."""
    whole = batch()
    old, ref = torch.where(whole.mask, -1.0, 0.0), torch.where(whole.mask, -1.5, 0.0)
    mine = governor(objectives=objectives(kl="min", entropy="max", reward="max"))
    _, record = mine.weigh(whole, Scores(old_logp=old, ref_logp=ref))
    means = [record[f"objective/{name}_mean"] for name in ("kl", "entropy", "reward")]
    assert means == pytest.approx([1.0, 2.0, 10.0])


def test_kl_of_the_whole_rollout_goes_before_that_of_the_last_update() -> None:
    """k1 = 0.1 for each of the 2 tokens that an answer has on average; the greedy twin is not one."""
    whole = batch()
    old, ref = torch.where(whole.mask, -1.0, 5.0), torch.where(whole.mask, -1.1, -5.0)
    for unit, far in (("token", 1.0), ("sequence", 2.0)):
        mine = governor(kl=DeadBand(coef=0.1, target=0.1, speed=1.5), unit=unit)
        _, record = mine.weigh(whole, Scores(old_logp=old, ref_logp=ref))
        assert record == {"rollout_kl_mean": pytest.approx(0.1), "rollout_kl_sequence": pytest.approx(0.2)}
        mine.observe({**FAR, **record})
        assert mine.kl_coef == pytest.approx(0.1 if far == 1.0 else 0.15)


def test_one_token_that_the_policy_has_turned_from_is_not_its_distance() -> None:
    """It is e^-7 likely to the policy and certain to the reference: 7 nats less in the sum, where k3 would add 1089."""
    whole = batch()
    old, ref = torch.where(whole.mask, -1.0, 5.0), torch.where(whole.mask, -1.5, -5.0)
    chosen = int((whole.mask & ~whole.baseline[trajectory_of_tokens(whole)]).nonzero()[0])
    old[chosen], ref[chosen] = -7.0, 0.0
    _, record = governor().weigh(whole, Scores(old_logp=old, ref_logp=ref))
    assert record["rollout_kl_sequence"] == pytest.approx((12 * 0.5 - 0.5 - 7.0) / 6)


def test_an_objective_that_no_reward_gives_is_refused() -> None:
    """A reward that gives several numbers gives none of its own name."""
    with pytest.raises(NovaError, match="judge/style"):
        governor(objectives=objectives(judge="max")).weigh(batch("judge/style"), Scores())


def make() -> Governor:
    constraints = {"kl": Lagrangian(sense="max", limit=0.3), "entropy": Lagrangian(sense="min", fraction=0.9)}
    return governor(constraints=constraints, objectives=objectives(right="max", length="min"))


def follow(mine: Governor, steps: range) -> list[Any]:
    found: list[Any] = []
    for step in steps:
        weighed, record = mine.weigh(batch(scale=1.0 + step), Scores())
        assert weighed is not None
        moved = mine.observe({"episodes": 8.0, "entropy": 0.9**step, "kl_mean": 0.1 * step, "kl_sequence": 0.0})
        found.append((weighed.tolist(), record, moved, ruled(mine)))
    return found


def test_it_resumes_exactly() -> None:
    whole, part = make(), make()
    all_of_it = follow(whole, range(8))
    assert follow(part, range(4)) == all_of_it[:4]
    again = make()
    again.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert follow(again, range(4, 8)) == all_of_it[4:]
    assert follow(make(), range(4, 8)) != all_of_it[4:], "the state says something"
    for name in ("kl", "constraints", "objectives"):
        lacking = make()
        lacking.load_state_dict({**part.state_dict(), name: make().state_dict()[name]})
        assert follow(lacking, range(4, 8)) != all_of_it[4:], name


def test_a_part_that_a_rollout_lacks_is_no_number_to_weigh() -> None:
    whole = batch("r/b")
    of_twin, of_answer = whole.baseline.nonzero().flatten()[0], (~whole.baseline).nonzero().flatten()[0]
    mine = governor(objectives=Objectives([Objective("r/b", "max")]))
    whole.rewards[of_twin] = math.nan  # which is not learnt from
    weighed, _ = mine.weigh(whole, Scores())
    assert weighed is not None
    whole.rewards[of_answer] = math.nan
    with pytest.raises(NovaError, match="some rollouts of the step have no value for it"):
        mine.weigh(whole, Scores())
