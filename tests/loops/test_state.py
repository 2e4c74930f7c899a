"""A loop's state is saved and read back exactly, whatever it holds."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from novarl.core.checkpoint import Checkpoints
from novarl.core.types import Credit, Scores
from novarl.data.pack import pack
from novarl.loops.state import LoopState, Pending
from tests.loops.fakes import prompts, rollout, scored


def pending() -> Pending:
    items = [scored(rollout(row, group, index), index / 3) for group, row in enumerate(prompts(3)) for index in (0, 1)]
    batch = pack(items)
    size = batch.tokens.numel()
    noise = torch.rand(3, size, generator=torch.Generator().manual_seed(0))
    scores, credit = Scores(old_logp=noise[0], ref_logp=noise[1]), Credit(advantage=noise[2])
    return Pending(batch, scores, credit, [[4, 5], [0, 1, 2, 3]], {"reward_mean": 0.1 + 0.2, "kl": float("nan")}, 1)


def test_a_minibatch_is_cut_alike_from_everything() -> None:
    whole = pending()
    whole.used = 0
    for trajectories in ([4, 5], [0, 1, 2, 3]):
        part, scores, credit = whole.next()
        owner = torch.repeat_interleave(whole.batch.traj, whole.batch.cu_seqlens.diff())
        index = torch.cat([(owner == trajectory).nonzero().flatten() for trajectory in trajectories])
        assert torch.equal(part.tokens, whole.batch.tokens[index])
        assert scores.old_logp is not None and whole.scores.old_logp is not None
        assert torch.equal(scores.old_logp, whole.scores.old_logp[index]) and scores.values is None
        assert torch.equal(credit.advantage, whole.credit.advantage[index])
    assert whole.used_up


def test_round_trip_through_a_checkpoint(tmp_path: Path) -> None:
    state = LoopState(3, 7, {"length": 3, "seed": 2**62, "position": 11}, ema=1 / 3, pending=pending())
    generator = torch.get_rng_state()
    saved = Checkpoints(tmp_path, keep=1).save("a", state.state_dict(), lambda folder: folder.mkdir(), order=7)
    torch.rand(3)
    found = LoopState()
    found.load_state_dict(saved.load())
    assert torch.equal(torch.get_rng_state(), generator)
    assert (found.step, found.update, found.stream, found.ema) == (3, 7, state.stream, 1 / 3)
    before, after = state.pending, found.pending
    assert before is not None and after is not None
    assert (after.minibatches, after.used) == (before.minibatches, 1)
    assert after.record["reward_mean"] == 0.1 + 0.2 and after.record["kl"] != after.record["kl"]
    for mine, theirs in ((before.batch, after.batch), (before.scores, after.scores), (before.credit, after.credit)):
        for column in fields(mine):
            one, two = getattr(mine, column.name), getattr(theirs, column.name)
            assert torch.equal(one, two) and one.dtype == two.dtype if isinstance(one, torch.Tensor) else one == two


def test_round_trip_without_a_rollout() -> None:
    found = LoopState()
    found.load_state_dict(LoopState(2, 4).state_dict())
    assert (found.step, found.update, found.ema, found.pending) == (2, 4, None, None)
