"""Which rollouts are learnt from, and how the rest is counted."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from novarl.core.errors import NovaError
from novarl.core.types import Scored
from novarl.loops.admit import Admission, describe, in_order
from tests.loops.fakes import prompts, rollout, scored

ROWS = prompts(9)


def group(number: int, rewards: Seq[float | None], *, twin: float | str | None = "none") -> list[Scored]:
    """A group's rollouts by their rewards, None for a failed one; `twin` is the greedy one's, if there is one."""
    found = [scored(rollout(ROWS[number], number, index), reward) for index, reward in enumerate(rewards)]
    if not isinstance(twin, str):
        found.append(scored(rollout(ROWS[number], number, 0, role="baseline"), twin))
    return found


def groups(kept: Seq[Scored]) -> list[int]:
    return sorted({item.rollout.group for item in kept})


VARIED, FLAT, FAILED = [0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [None, None, None]


def test_plain_admission_asks_once_and_keeps_what_did_not_fail() -> None:
    admission = Admission()
    assert admission.missing([], 3, asked=0) == 3
    items = group(0, VARIED) + group(1, FLAT) + group(2, [None, 0.5, None])
    assert admission.missing(items, 3, asked=3) == 0
    kept = admission.keep(items, 3)
    assert groups(kept) == [0, 1, 2] and len(kept) == 7 and all(item.reward is not None for item in kept)


def test_dynamic_sampling_refills_what_does_not_vary() -> None:
    admission = Admission(varied=True, max_refills=2)
    items = group(0, VARIED) + group(1, FLAT) + group(2, FAILED)
    assert admission.missing(items, 3, asked=3) == 2
    items += group(3, FLAT) + group(4, VARIED)
    assert admission.missing(items, 3, asked=5) == 1
    items += group(5, VARIED)
    assert admission.missing(items, 3, asked=6) == 0
    assert groups(admission.keep(items, 3)) == [0, 4, 5]


def test_dynamic_sampling_gives_up_after_its_refills() -> None:
    admission = Admission(varied=True, max_refills=2)
    items = group(0, VARIED) + [item for number in range(1, 9) for item in group(number, FLAT)]
    assert admission.missing(items, 3, asked=8) == 2
    assert admission.missing(items, 3, asked=9) == 0
    assert groups(admission.keep(items, 3)) == [0], "fewer groups, rather than flat ones"


def test_turns_are_reported_where_there_are_several() -> None:
    items = group(0, VARIED)
    assert "turns_mean" not in describe(items, items)
    longer = [
        replace(item, rollout=replace(item.rollout, info={"turns": 1 + turns})) for turns, item in enumerate(items)
    ]
    assert describe(longer, longer)["turns_mean"] == 2.0


def test_more_groups_than_wanted_are_not_kept() -> None:
    items = [item for number in (4, 1, 7, 2) for item in group(number, VARIED)]
    assert groups(Admission(varied=True).keep(items, 3)) == [1, 2, 4]


def test_where_no_group_varies_the_first_are_kept() -> None:
    """Their advantages are 0, and the run goes on; a group that failed is not among them."""
    items = group(0, FAILED) + group(1, FLAT) + group(2, FLAT) + group(3, FLAT)
    assert groups(Admission(varied=True, max_refills=1).keep(items, 2)) == [1, 2]


@pytest.mark.parametrize("varied", [False, True])
def test_everything_failed(varied: bool) -> None:
    items = group(0, FAILED) + group(1, FAILED)
    with pytest.raises(NovaError, match="the reward failed for every rollout of the step: no number") as raised:
        Admission(varied=varied).keep(items, 2)
    assert raised.value.where == "reward"


def test_a_group_without_its_greedy_twin_is_not_admitted() -> None:
    admission = Admission(needs_twin=True)
    items = group(0, VARIED, twin=0.5) + group(1, VARIED, twin=None) + group(2, FAILED, twin=1.0)
    kept = admission.keep(items, 3)
    assert groups(kept) == [0] and [item.rollout.role for item in kept] == ["train"] * 3 + ["baseline"]


def test_every_twin_failed() -> None:
    """There is no baseline for anything: the run must not go on with NaN."""
    items = group(0, VARIED, twin=None) + group(1, FLAT, twin=None)
    with pytest.raises(NovaError, match="no prompt of the step has rewards for both an answer and the greedy baseline"):
        Admission(needs_twin=True).keep(items, 2)


def test_what_is_told_of_a_rollout_phase() -> None:
    items = group(0, [0.0, 1.0, None]) + group(1, FLAT) + group(2, [None, 4.0, 0.0], twin=9.0)
    kept = Admission(varied=True).keep(items, 3)
    record = describe(items, kept)
    assert record["reward_raw_mean"] == pytest.approx((0 + 1 + 3 + 4 + 0) / 7), "over all that did not fail"
    assert record["reward_mean"] == pytest.approx(5 / 4), "over what is learnt from"
    assert record["reward_std"] == pytest.approx(1.6393596310755)
    assert record["failed_rollouts"] == 2.0 and record["episodes"] == 9.0
    assert (record["groups_kept"], record["groups_dropped"], record["zero_variance_groups"]) == (2.0, 1.0, 0.0)
    # Answers of 1, 2, 2 and 3 tokens after prompts of 3.
    assert (record["length_mean"], record["length_max"]) == (2.0, 3.0)
    assert (record["prompt_tokens"], record["completion_tokens"]) == (12.0, 8.0)
    assert record["truncated_fraction"] == 0.0 and record["rewards/r_mean"] == pytest.approx(5 / 4)


def test_zero_variance_groups_are_counted() -> None:
    items = group(0, VARIED) + group(1, FLAT) + group(2, [None, 1.0, None])
    assert describe(items, Admission().keep(items, 3))["zero_variance_groups"] == 2.0


def test_truncated_rollouts_are_counted() -> None:
    cut = scored(rollout(ROWS[0], 0, 0, status="truncated"), 1.0)
    assert describe([cut], [cut])["truncated_fraction"] == 1.0


def test_order_is_that_of_one_process() -> None:
    items = [item for number in range(4) for item in group(number, VARIED, twin=1.0)]
    told = in_order([items], range(4))
    assert [(item.rollout.group, item.rollout.role, item.rollout.index) for item in told[:4]] == [
        (0, "baseline", 0),
        (0, "train", 0),
        (0, "train", 1),
        (0, "train", 2),
    ]
    mine = [item for item in items if item.rollout.group % 2]
    theirs = [item for item in items if not item.rollout.group % 2]
    assert in_order([mine, theirs], range(4)) == told
    with pytest.raises(RuntimeError, match="two ranks sampled the same prompt"):
        in_order([items, theirs], range(4))
    with pytest.raises(RuntimeError, match="did not sample all requested prompts"):
        in_order([mine], range(4))
