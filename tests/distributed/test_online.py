"""The ranks of an online run ask for different prompts, together those of one process, and then know the same."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from novarl.core.types import Prompt, Record, Rollout
from novarl.distributed.ranks import Ranks
from novarl.loops.admit import Admission
from novarl.loops.evaluate import evaluate
from novarl.loops.online import online
from novarl.loops.state import LoopState
from tests.distributed.fork import run
from tests.invariance import sharp
from tests.loops.fakes import Seen, by_index, prompts, stages

ROWS = 11
STEPS = 4


def uneven(item: Rollout) -> float | None:
    """Every third row always scores the same, and one rollout fails."""
    row = int(item.prompt.id.split("/")[1])
    if row == 4 and item.index == 1:
        return None
    return 1.0 if row % 3 == 0 else by_index(item)


def follow(ranks: Ranks, varied: bool) -> tuple[list[list[tuple[int, str]]], list[Record], dict[str, Any]]:
    """A run of the loop: what this rank was asked for, the records, and the last batch."""
    seen = Seen()
    parts = stages(
        seen,
        rows=prompts(ROWS),
        reward=uneven,
        admission=Admission(varied=varied),
        ranks=ranks,
        prompts_per_rollout=5,
        updates_per_rollout=2,
    )
    records = list(online(LoopState(), parts, steps=STEPS))
    last = seen.batches[-1]
    columns = {field.name: getattr(last, field.name) for field in fields(last)}
    return seen.asked, records, {name: value for name, value in columns.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("varied", [False, True], ids=["plain", "dynamic sampling"])
def test_prompts_are_disjoint_and_their_union_is_that_of_one_process(varied: bool, world: int) -> None:
    asked, records, batch = follow(Ranks(), varied)
    parts = run(follow, varied, world=world)
    assert len(asked) == STEPS if not varied else len(asked) > STEPS
    for number, alone in enumerate(asked):
        shares = [part[0][number] for part in parts]
        together = sorted(item for share in shares for item in share)
        assert len(set(together)) == len(together), "two ranks were asked for the same group"
        assert together == alone, "the ranks together must be asked for what one process is"
    for _, theirs, columns in parts:
        assert theirs == records
        assert all(torch.equal(columns[name], batch[name]) for name in batch)


def sample(ranks: Ranks) -> list[tuple[int, int, str]]:
    mine = sharp.sampler(sharp.sharp_policy()).train(ranks.share(list(enumerate(sharp.prompts()))), 0)
    return sorted((item.group, item.index, item.text) for part in ranks.gather(mine) for item in part)


def test_live_sampling_is_that_of_one_process() -> None:
    """Until a near-tie tips: with equal weights on both sides there is hardly anything to tip it."""
    alone = sample(Ranks())
    assert len(alone) == 24 and len({text for *_, text in alone}) > 6
    assert run(sample) == [alone, alone]


def confused(ranks: Ranks, rank: int, size: int) -> str:
    """Every process takes itself for `rank` of `size`, and the gathering is that of the true ones."""
    wrong = Ranks(rank, size)
    wrong.gather = ranks.gather  # type: ignore[method-assign]
    try:
        next(online(LoopState(), stages(Seen(), rows=prompts(ROWS), ranks=wrong), steps=1))
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


def forgetful(ranks: Ranks) -> str:
    """There are two processes, and both share with a third that does not exist."""
    return confused(ranks, ranks.rank, 3)


def alike(ranks: Ranks) -> str:
    """Both processes take themselves for the only one."""
    return confused(ranks, 0, 1)


def test_prompts_sampled_twice_or_not_at_all_are_noticed() -> None:
    assert run(alike) == ["two ranks sampled the same prompt"] * 2
    assert run(forgetful) == ["the ranks did not sample all requested prompts"] * 2


def judge(ranks: Ranks) -> tuple[object, ...]:
    asking = sharp.sampler(sharp.sharp_policy())

    def sample(asked: Seq[tuple[int, Prompt]], samples: int, temperature: float) -> list[Rollout]:
        return asking.evaluate(asked, samples, replace(asking.sampling, temperature=temperature))

    found = evaluate(list(sharp.prompts()), sample, sharp.score, ranks=ranks, k=4)
    return found.score, found.interval, found.n, found.pass_at, [item.rollout.text for item in found.rows]


def test_evaluation_is_that_of_one_process() -> None:
    alone = judge(Ranks())
    _, _, n, pass_at, _ = alone
    assert n == 6 and isinstance(pass_at, dict) and 0.0 < pass_at[1] < pass_at[4]
    assert run(judge) == [alone, alone]


def lone_failure(ranks: Ranks) -> Record:
    """All rollouts of one rank fail; the others are learnt from, on every rank."""

    def reward(item: Rollout) -> float | None:
        return None if item.group % 2 == 0 else by_index(item)

    parts = stages(Seen(), rows=prompts(ROWS), reward=reward, ranks=ranks)
    return next(online(LoopState(), parts, steps=1))


def test_a_rank_whose_rollouts_all_fail_goes_on() -> None:
    alone = lone_failure(Ranks())
    assert alone["failed_rollouts"] == 6.0 and alone["groups_kept"] == 2.0
    assert run(lone_failure) == [alone, alone]
