"""What the loop itself decides: who is asked, what is learnt from in which update, and what is said of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from novarl.core.errors import NovaError
from novarl.core.types import Rollout
from novarl.loops.admit import Admission
from novarl.loops.online import online
from novarl.loops.state import LoopState
from tests.loops.fakes import Seen, by_index, prompts, stages


def test_a_record_for_every_update() -> None:
    seen, state = Seen(), LoopState()
    places = []
    for record in online(state, stages(seen, rows=prompts(9), updates_per_rollout=2), steps=3):
        places.append((state.step, state.update, state.pending.used if state.pending else None))
        assert {"tokens", "reward_mean", "advantage_std", "epoch"} <= record.keys()
    assert places == [(0, 1, 1), (1, 2, None), (1, 3, 1), (2, 4, None), (2, 5, 1), (3, 6, None)]
    assert seen.published == [0, 2, 4], "the engine gets the weights, and their version, before each rollout"
    assert seen.checked == 1, "sampler and learner are compared before the very first update only"
    assert [step for step, _, _ in seen.kept] == [1, 2, 3]


def test_a_finished_loop_does_nothing() -> None:
    seen = Seen()
    assert list(online(LoopState(step=3, update=5), stages(seen, rows=prompts(4)), steps=3)) == []
    assert not seen.asked and not seen.published


def test_a_resumed_run_is_not_checked_again() -> None:
    seen = Seen()
    next(online(LoopState(step=1, update=2), stages(seen, rows=prompts(4)), steps=2))
    assert seen.checked == 0 and seen.published == [2]


def asked(seed: int, *, rows: int = 6, steps: int = 6) -> list[str]:
    seen = Seen()
    list(online(LoopState(), stages(seen, rows=prompts(rows), seed=seed), steps=steps))
    return [name for turn in seen.asked for _, name in turn]


def test_every_epoch_asks_every_prompt_once() -> None:
    names = asked(0)
    assert len(names) == 24
    for epoch in range(4):
        assert set(names[6 * epoch : 6 * epoch + 6]) == {f"row/{row}" for row in range(6)}
    assert names[:6] != names[6:12] != names[12:18], "each epoch in an order of its own"
    assert names == asked(0) != asked(1)


def test_the_epoch_is_reported() -> None:
    epochs = [record["epoch"] for record in online(LoopState(), stages(Seen(), rows=prompts(6)), steps=4)]
    assert epochs == [1.0, 2.0, 2.0, 3.0], "that of the last prompt, from 1"


def test_each_epoch_of_updates_learns_from_every_trajectory_once() -> None:
    seen = Seen()
    parts = stages(seen, rows=prompts(9), prompts_per_rollout=8, updates_per_rollout=4, epochs_per_rollout=2)
    list(online(LoopState(), parts, steps=1))
    assert [batch.reward.numel() for batch in seen.batches] == [12, 12, 12, 12]
    whole = Counter({(group, index): 1 for group in range(8) for index in range(3)})
    parted = [Counter(zip(b.group.tolist(), b.reward.int().tolist(), strict=True)) for b in seen.batches]
    assert parted[0] + parted[1] == parted[2] + parted[3] == whole
    assert parted[0] not in (parted[2], parted[3]), "another epoch, another division"
    for batch in seen.batches:
        assert all(count == 3 for count in Counter(batch.group.tolist()).values()), "groups stay whole"


def test_a_minibatch_takes_its_advantages_along() -> None:
    """Rewards 0, 1, 2 in each group: the advantage of a token is its trajectory's reward less 1."""
    seen = Seen()
    list(online(LoopState(), stages(seen, rows=prompts(5), updates_per_rollout=2), steps=2))
    assert len(seen.batches) == 4
    for batch, advantages in zip(seen.batches, seen.advantages, strict=True):
        owner = torch.repeat_interleave(batch.traj, batch.cu_seqlens.diff())
        assert advantages == (batch.reward[owner] - 1.0)[batch.mask].tolist()


def test_failed_rollouts_are_left_out_and_counted() -> None:
    def reward(item: Rollout) -> float | None:
        return None if item.group == 2 or (item.group, item.index) == (0, 1) else by_index(item)

    seen = Seen()
    record = next(online(LoopState(), stages(seen, rows=prompts(9), reward=reward), steps=1))
    assert record["failed_rollouts"] == 4.0 and record["episodes"] == 12.0
    assert (record["groups_kept"], record["groups_dropped"]) == (3.0, 1.0)
    (batch,) = seen.batches
    assert batch.group.tolist() == [0, 0, 1, 1, 1, 3, 3, 3] and bool(torch.isfinite(batch.reward).all())
    assert seen.advantages[0][:4] == [-1.0, 1.0, 1.0, 1.0], "compared with those of its group that are left"
    ((_, items, _),) = seen.kept
    assert len(items) == 12, "the log shows the failed ones too"


def test_everything_failed_ends_the_run() -> None:
    seen = Seen()
    with pytest.raises(NovaError, match="the reward failed for every rollout of the step"):
        next(online(LoopState(), stages(seen, rows=prompts(9), reward=lambda item: None), steps=1))
    assert not seen.batches


def test_dynamic_sampling_asks_others_in_place_of_flat_groups() -> None:
    def reward(item: Rollout) -> float:
        return 1.0 if int(item.prompt.id.split("/")[1]) % 2 else by_index(item)

    seen = Seen()
    parts = stages(seen, rows=prompts(20), reward=reward, admission=Admission(varied=True, max_refills=9))
    record = next(online(LoopState(), parts, steps=1))
    assert len(seen.asked) > 1 and len(seen.asked[0]) == 4
    groups = [group for turn in seen.asked for group, _ in turn]
    assert groups == list(range(len(groups))), "a refill goes on counting"
    names = [name for turn in seen.asked for _, name in turn]
    assert len(set(names)) == len(names), "and goes on in the stream"
    (batch,) = seen.batches
    assert record["groups_kept"] == 4.0 and record["groups_dropped"] == len(names) - 4
    assert record["zero_variance_groups"] == 0.0 and len(set(batch.group.tolist())) == 4
    assert record["reward_mean"] == 1.0 and record["reward_raw_mean"] == 1.0
    assert all(advantage != 0.0 for advantage in (seen.advantages[0][0], seen.advantages[0][-1]))


def test_dynamic_sampling_that_finds_nothing_goes_on() -> None:
    seen = Seen()
    admission = Admission(varied=True, max_refills=2)
    record = next(
        online(LoopState(), stages(seen, rows=prompts(5), reward=lambda item: 1.0, admission=admission), steps=1)
    )
    assert [len(turn) for turn in seen.asked] == [4, 4, 4]
    assert record["zero_variance_groups"] == record["groups_kept"] == 4.0
    assert set(seen.advantages[0]) == {0.0}


def test_scst_compares_with_the_greedy_twin() -> None:
    def reward(item: Rollout) -> float | None:
        if item.role == "baseline":
            return None if item.group == 1 else 0.25 * item.group
        return by_index(item)

    seen = Seen()
    parts = stages(
        seen, rows=prompts(9), reward=reward, twin=True, estimator="scst", admission=Admission(needs_twin=True)
    )
    record = next(online(LoopState(), parts, steps=1))
    (batch,), whole = seen.batches, seen.kept[0][2].batch
    assert whole.baseline.sum() == 3 and sorted(set(batch.group.tolist())) == [0, 2, 3], "no twin, no group"
    owner = torch.repeat_interleave(batch.traj, batch.cu_seqlens.diff())
    assert not bool(batch.baseline.any()), "a twin is never trained on"
    expected = (batch.reward - 0.25 * batch.group)[owner][batch.mask]
    assert seen.advantages[0] == pytest.approx(expected.tolist())
    assert record["episodes"] == 12.0 and record["reward_mean"] == 1.0, "nor counted among the rewards"


def test_the_moving_average_is_carried_from_step_to_step() -> None:
    seen, state = Seen(), LoopState()
    averages = []
    for _ in online(state, stages(seen, rows=prompts(9), estimator="ema"), steps=2):
        averages.append(state.ema)
    assert averages == [1.0, 1.0]
    assert seen.advantages[0][:3] == [0.0, 1.0, 1.0], "there is no baseline yet"
    assert seen.advantages[1][:3] == [-1.0, 0.0, 0.0]
