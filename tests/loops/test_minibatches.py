"""Minibatches hold what is trained on: a greedy twin is in none, however many updates share a rollout."""

from __future__ import annotations

import pytest

from novarl.loops.admit import Admission
from novarl.loops.online import online
from novarl.loops.state import LoopState
from tests.loops.fakes import Seen, prompts, stages


@pytest.mark.parametrize("updates", [1, 2, 5, 8])
def test_no_minibatch_consists_of_greedy_twins(updates: int) -> None:
    for seed in range(5):
        seen = Seen()
        parts = stages(
            seen,
            rows=prompts(9),
            samples=2,
            twin=True,
            estimator="scst",
            admission=Admission(needs_twin=True),
            updates_per_rollout=updates,
            seed=seed,
        )
        list(online(LoopState(), parts, steps=1))
        assert len(seen.batches) == updates, "4 groups of 2 trajectories, and a twin each"
        trained = [(int(g), float(r)) for b in seen.batches for g, r in zip(b.group, b.reward, strict=True)]
        assert sorted(trained) == [(group, float(index)) for group in range(4) for index in range(2)]
        assert not any(bool(batch.baseline.any()) for batch in seen.batches)
        assert all(seen.advantages), "every update has tokens to learn from"


def test_the_twins_take_part_in_no_later_epoch_either() -> None:
    seen = Seen()
    admission = Admission(needs_twin=True)
    parts = stages(
        seen,
        rows=prompts(9),
        samples=2,
        twin=True,
        estimator="scst",
        admission=admission,
        updates_per_rollout=6,
        epochs_per_rollout=2,
    )
    list(online(LoopState(), parts, steps=1))
    assert [batch.reward.numel() for batch in seen.batches].count(0) == 0
    assert sum(batch.reward.numel() for batch in seen.batches) == 2 * 8
