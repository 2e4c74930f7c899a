"""A run that samples truncated is resumed to the bit, in turn and one step ahead."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from novarl.core.checkpoint import Checkpoint, Checkpoints
from novarl.loops.online import online
from novarl.loops.stale import stale
from novarl.models.load import load, save
from tests.invariance.sharp import sampler, sharp_policy
from tests.loops.test_resume import RULES, STEPS, YIELDS, Run, Trace, build, same
from tests.loops.test_stale import Beside, equal

CUT: dict[str, Any] = {"top_p": 0.9, "supports": True}


class CutBeside(Beside):
    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.sampler = sampler(sharp_policy(), **CUT)


def loop(run: Run, *, ahead: bool) -> Any:
    if ahead:
        return stale(run.state, run.stages, CutBeside(run), steps=STEPS)
    return online(run.state, run.stages, steps=STEPS)


def begun(policy: Any, **sampling: Any) -> Run:
    return build(policy, RULES["group and KL"], **sampling)


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one step ahead"])
def test_every_yield_is_resumable(ahead: bool, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=YIELDS)
    whole: Trace = []
    saved: list[Checkpoint] = []
    run = begun(sharp_policy(), **CUT)
    for number, record in enumerate(loop(run, ahead=ahead)):
        saved.append(checkpoints.save(f"yield-{number}", run.snapshot(), partial(save, run.policy), order=number))
        whole.append((record, run.weights()))
    assert len(whole) == YIELDS and not same(whole[0][1], whole[-1][1])
    states = [checkpoint.load()["loop"] for checkpoint in saved]
    assert any("support" in state["pending"]["batch"] for state in states if state["pending"])
    if ahead:
        sequences = states[0]["ahead"]["scored"][0]["rollout"]["sequences"]
        assert any(any(sequence.get("support", [])) for sequence in sequences)
    for number, checkpoint in enumerate(saved):
        again = begun(load(str(checkpoint.model)), **CUT)
        again.load(checkpoint.load())
        rest = [(record, again.weights()) for record in loop(again, ahead=ahead)]
        assert equal(rest, whole[number + 1 :]), f"after yield {number}"


def test_without_truncation_nothing_of_it_is_saved() -> None:
    run = begun(sharp_policy())
    next(loop(run, ahead=False))
    assert not {"support", "cu_support"} & run.snapshot()["loop"]["pending"]["batch"].keys()
