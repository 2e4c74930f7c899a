from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Seq
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from novarl.core.types import Batch, Prompt, Rollout, Scored, Sequence
from novarl.data.pack import (
    microbatches,
    minibatches,
    pack,
    pack_sequences,
    padded,
    padded_microbatches,
    partition,
    select,
)

PURE = settings(
    deadline=None, derandomize=True, database=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow]
)
LENGTHS = st.lists(st.integers(0, 60), max_size=24)


def sequence(*tokens: int, prompt: int = 1, version: int = 0) -> Sequence:
    count = len(tokens)
    mask = tuple(i >= prompt for i in range(count))
    logp = tuple(-token / 7 for token in tokens)
    return Sequence(tokens, mask, logp, (0.0,) * count, tuple(version + i for i in range(count)))


def scored(
    *sequences: Sequence, reward: float | None = 1.0, group: int = 0, rewards: Any = None, **rollout: Any
) -> Scored:
    prompt = Prompt("p", (1,), ())
    made = Rollout(prompt, group, 0, sequences, (), "", **rollout)
    return Scored(made, {"r": reward} if rewards is None else rewards, reward)


def example() -> Batch:
    return pack(
        [
            scored(sequence(10, 11, 12), reward=0.5, group=7, rewards={"a": 0.5, "b": 2.0}),
            scored(
                sequence(20, 21), sequence(22, 23, 24, 25, prompt=2, version=5), reward=1.5, group=7, rewards={"a": 1.5}
            ),
            scored(sequence(30, 31), reward=0.25, group=9, rewards={"a": 0.25, "b": 0.0}, role="baseline"),
            scored(sequence(40, 41, 42, prompt=2), reward=0.0, group=9, rewards={"a": 0, "b": 1}, status="truncated"),
        ],
        dtype=torch.float64,
    )


def test_pack_by_hand() -> None:
    batch = example()
    assert batch.tokens.tolist() == [10, 11, 12, 20, 21, 22, 23, 24, 25, 30, 31, 40, 41, 42]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert batch.prev.tolist() == [-1, 0, 1, -1, 3, -1, 5, 6, 7, -1, 9, -1, 11, 12]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 9, 11, 14]
    assert batch.mask.int().tolist() == [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    logp = [0, -11 / 7, -12 / 7, 0, -21 / 7, 0, 0, -24 / 7, -25 / 7, 0, 0, 0, 0, -42 / 7]
    assert batch.behavior_logp.tolist() == logp
    assert batch.version.tolist() == [0, 1, 2, 0, 1, 5, 6, 7, 8, 0, 1, 0, 1, 2]
    assert batch.traj.tolist() == [0, 1, 1, 2, 3]
    assert batch.group.tolist() == [7, 7, 9, 9]
    assert batch.reward.tolist() == [0.5, 1.5, 0.25, 0.0]
    assert batch.reward_names == ("a", "b")
    assert torch.equal(batch.rewards.isnan(), torch.tensor([[0, 0], [0, 1], [0, 0], [0, 0]], dtype=torch.bool))
    assert batch.rewards[:, 0].tolist() == [0.5, 1.5, 0.25, 0.0]
    assert batch.truncated.tolist() == [False, False, False, True]
    assert batch.baseline.tolist() == [False, False, True, False]
    assert {getattr(batch, name).dtype for name in ("tokens", "prev", "cu_seqlens", "traj", "group", "version")} == {
        torch.int64
    }
    assert pack([scored(sequence(1, 2))]).behavior_logp.dtype == torch.float32


def test_a_failed_rollout_or_a_senseless_sequence_is_not_packed() -> None:
    with pytest.raises(ValueError, match="failed rollout of prompt p"):
        pack([scored(sequence(1, 2), reward=None)])
    with pytest.raises(ValueError, match="failed rollout"):
        pack([scored(sequence(1, 2), status="failed")])
    with pytest.raises(ValueError, match="trajectory 1 cannot be packed: it is empty"):
        pack([scored(sequence(1, 2)), scored(sequence())])
    with pytest.raises(ValueError, match="first token, which nothing predicts"):
        pack([scored(sequence(1, 2, prompt=0))])


def test_nothing_packs_to_nothing() -> None:
    for batch in (pack([]), pack_sequences([]), select(example(), [])[0]):
        assert batch.tokens.shape == (0,) and batch.cu_seqlens.tolist() == [0]
        assert batch.group.shape == batch.reward.shape == batch.traj.shape == (0,)
        assert padded(batch.tokens, batch.cu_seqlens, 0).shape == (0, 0)
    assert select(example(), [])[0].reward_names == ("a", "b")


def test_sequences_to_imitate() -> None:
    batch = pack_sequences([sequence(1, 2, 3), sequence(4, 5)])
    assert batch.traj.tolist() == batch.group.tolist() == [0, 1]
    assert batch.mask.int().tolist() == [0, 1, 1, 0, 1]
    assert batch.reward.tolist() == [0.0, 0.0] and batch.rewards.shape == (2, 0)


def same(a: Batch, b: Batch) -> bool:
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(Batch)]
    return all(
        torch.equal(x.nan_to_num(9), y.nan_to_num(9)) and x.dtype == y.dtype if isinstance(x, Tensor) else x == y
        for x, y in pairs
    )


@st.composite
def rollouts(draw: st.DrawFn) -> list[Scored]:
    made = []
    for number in range(draw(st.integers(1, 6))):
        sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        sequences = [sequence(*range(100 * number + 10 * i, 100 * number + 10 * i + n)) for i, n in enumerate(sizes)]
        role = draw(st.sampled_from(["train", "baseline"]))
        made.append(scored(*sequences, reward=float(number), group=draw(st.integers(0, 3)), role=role))
    return made


@PURE
@given(rollouts(), st.randoms(use_true_random=False))
def test_selecting_is_packing_the_chosen(made: list[Scored], rng: random.Random) -> None:
    chosen = rng.sample(range(len(made)), rng.randint(0, len(made)))
    batch = pack(made)
    part, index = select(batch, chosen)
    if chosen:
        assert same(part, pack([made[i] for i in chosen]))
    assert torch.equal(part.tokens, batch.tokens[index])
    assert torch.equal(batch.position_ids[index], part.position_ids)


def test_padded() -> None:
    batch = example()
    assert padded(batch.tokens, batch.cu_seqlens, 99).tolist() == [
        [10, 11, 12, 99],
        [20, 21, 99, 99],
        [22, 23, 24, 25],
        [30, 31, 99, 99],
        [40, 41, 42, 99],
    ]
    assert padded(batch.mask, batch.cu_seqlens, False).dtype == torch.bool
    wide = torch.arange(28.0).reshape(14, 2).requires_grad_()
    view = padded(wide, batch.cu_seqlens, 0.0)
    assert view.shape == (5, 4, 2)
    (view * torch.arange(40.0).reshape(5, 4, 2)).sum().backward()
    assert wide.grad is not None and wide.grad[3].tolist() == [8.0, 9.0]


def best_makespan(lengths: Seq[int], parts: int) -> int:
    return min(
        max(
            sum(length for length, owner in zip(lengths, owners, strict=True) if owner == part) for part in range(parts)
        )
        for owners in itertools.product(range(parts), repeat=len(lengths))
    )


@PURE
@given(LENGTHS, st.integers(1, 8))
def test_partition_covers_everything_once(lengths: list[int], parts: int) -> None:
    split = partition(lengths, parts)
    assert len(split) == parts
    assert sorted(itertools.chain(*split)) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in split)


@settings(PURE, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_partition_is_balanced(lengths: list[int], parts: int) -> None:
    heaviest = max(sum(lengths[i] for i in part) for part in partition(lengths, parts))
    assert 3 * parts * heaviest <= (4 * parts - 1) * best_makespan(lengths, parts)


def test_partition_by_hand() -> None:
    assert partition([5, 9, 1, 7, 6], 2) == [[0, 1], [2, 3, 4]]
    assert partition([3], 3) == [[0], [], []]
    assert partition([], 2) == [[], []]
    assert partition([4, 4, 4, 4], 2) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError):
        partition([1], 0)


@PURE
@given(LENGTHS, st.integers(1, 100))
def test_microbatches_keep_the_budget(lengths: list[int], budget: int) -> None:
    split = microbatches(lengths, budget)
    assert sorted(itertools.chain(*split)) == list(range(len(lengths)))
    assert all(part and part == sorted(part) for part in split)
    sizes = [sum(lengths[i] for i in part) for part in split]
    assert sizes == sorted(sizes, reverse=True), "what the first leaves in memory holds each of the others"
    assert all(sum(lengths[i] for i in part) <= budget or len(part) == 1 for part in split)
    # any two of them could not have been one, up to the slack of the heuristic
    assert len(split) <= 2 * (sum(lengths) // budget + 1) + sum(length > budget for length in lengths)


def test_microbatches_are_balanced_and_few() -> None:
    assert microbatches([6, 6, 6, 6], 13) == [[0, 2], [1, 3]]
    assert microbatches([10, 1, 1], 12) == [[0, 1, 2]]
    assert microbatches([10, 2, 2, 2], 12) == [[0], [1, 2, 3]]
    assert microbatches([50, 3, 4], 10) == [[0], [1, 2]]
    assert microbatches([], 10) == []
    rng = random.Random(0)
    lengths = [rng.randint(50, 500) for _ in range(256)]
    sizes = [sum(lengths[i] for i in part) for part in microbatches(lengths, 4096)]
    assert len(sizes) == -(-sum(lengths) // 4096)
    assert max(sizes) - min(sizes) < 60
    with pytest.raises(ValueError):
        microbatches([1], 0)


@PURE
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 60)), max_size=30), st.integers(1, 200))
def test_padded_microbatches_keep_the_budget_with_their_padding(shapes: list[tuple[int, int]], budget: int) -> None:
    split = padded_microbatches(shapes, budget)
    assert sorted(itertools.chain(*split)) == list(range(len(shapes)))
    assert all(part and part == sorted(part) for part in split)
    sizes = [sum(shapes[i][0] for i in part) * max(shapes[i][1] for i in part) for part in split]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size <= budget or len(part) == 1 for size, part in zip(sizes, split, strict=True))


def test_one_long_sequence_is_not_padded_to_by_many_short_ones() -> None:
    assert padded_microbatches([(1, 2000), *[(1, 50)] * 40], 4096) == [[0], list(range(1, 41))]
    assert padded_microbatches([(1, 40), (2, 20), (1, 30), (1, 19)], 160) == [[0, 1, 2], [3]]
    with pytest.raises(ValueError):
        padded_microbatches([(1, 1)], 0)


@PURE
@given(st.lists(st.integers(-5, 5), max_size=30), st.integers(1, 6), st.integers(0, 3))
def test_minibatches_keep_groups_whole(groups: list[int], k: int, seed: int) -> None:
    split = minibatches(groups, k, seed)
    assert sorted(itertools.chain(*split)) == list(range(len(groups)))
    assert len(split) == min(k, len(groups))
    assert all(part and part == sorted(part) for part in split)
    if len(set(groups)) >= k:
        owners = [{groups[i] for i in part} for part in split]
        assert sum(map(len, owners)) == len(set(groups))
    assert split == minibatches(groups, k, seed)


def test_minibatches_are_even_and_random() -> None:
    groups = [i // 8 for i in range(128)]
    split = minibatches(groups, 4, seed=1)
    assert [len(part) for part in split] == [32] * 4
    assert split != minibatches(groups, 4, seed=2)
    assert split != [list(range(32 * i, 32 * i + 32)) for i in range(4)]
    assert minibatches(groups, 1, seed=1) == [list(range(128))]
    assert sorted(map(len, minibatches([0] * 10, 3, seed=0))) == [3, 3, 4]
    with pytest.raises(ValueError):
        minibatches([1], 0, seed=0)
