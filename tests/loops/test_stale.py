"""One step off-policy: the lag is exactly one step, the clock has no say, and a run resumed is the same run.

The parts are the real ones on the small trained model; the sampler is a second copy of the model in a thread, so that a
run takes a fraction of a second. The process that samples in earnest has its own runs below, by the command line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from novarl.compose.overlap import FarSampler
from novarl.compose.resolve import resolve_rl
from novarl.config.load import load as load_config
from novarl.config.tree import RLConfig
from novarl.core.checkpoint import Checkpoint, Checkpoints
from novarl.core.errors import NovaError
from novarl.core.types import Prompt, Scored
from novarl.distributed.ranks import Ranks
from novarl.learn.scorer import Scorer
from novarl.loops import online as online_module
from novarl.loops.online import Stages, online
from novarl.loops.stale import stale
from novarl.loops.state import LoopState
from novarl.models.load import load, save
from novarl.run.machine import check_overlap, divided_threads
from tests.compose.harness import QUIET, deterministic_metrics, finished, novarl, weights
from tests.invariance.sharp import sampler, score, sharp_policy
from tests.loops.test_resume import RULES, STEPS, YIELDS, Run, Trace, build, same

RULE = RULES["group and KL"]


class Beside:
    """Samples with a copy of the model, in the thread of the loop; `pause` seconds before each answer."""

    def __init__(self, run: Run, *, seed: int = 0, pause: float = 0.0) -> None:
        self.learner, self.pause = run.policy, pause
        self.sampler = sampler(sharp_policy(), seed=seed)
        self.published: list[int] = []

    def publish(self, version: int) -> None:
        self.published.append(version)
        named = {name: value.detach().clone() for name, value in self.learner.model.named_parameters()}
        self.sampler.engine.publish(named.items(), version)

    def play(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Scored]:
        time.sleep(self.pause)
        return score(self.sampler.train(asked, step))


class Waiting(Beside):
    """From the second step on it waits until somebody says that the answers are wanted."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.wanted = threading.Event()

    def play(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Scored]:
        if step > 1:
            self.wanted.wait()
        return super().play(asked, step)


class Reversed(Beside):
    """Whatever was asked for first arrives last."""

    def play(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Scored]:
        return super().play(asked, step)[::-1]


class Forgetful(Beside):
    """Goes on with the weights it had, under the name of those it was given: the fault that nobody sees."""

    def publish(self, version: int) -> None:
        if version == 0:
            super().publish(version)
        else:
            self.sampler.engine.publish(dict(self.sampler.engine._runner.model.named_parameters()).items(), version)  # type: ignore[attr-defined]


class Late(Beside):
    """Does not even notice that it was given others."""

    def publish(self, version: int) -> None:
        if version == 0:
            super().publish(version)


def follow(run: Run, beside: Beside, *, steps: int = STEPS) -> Trace:
    return [(record, run.weights()) for record in stale(run.state, run.stages, beside, steps=steps)]


def lags(run: Run, loop: Any) -> list[int]:
    """How many steps old the weights are that sampled each step's answers, by the answers' own log-probabilities."""
    scorer = Scorer(sharp_policy().model, chunk=64)
    at_start: list[dict[str, Tensor]] = []
    found: list[int] = []

    def keep(step: int, scored: object, pending: Any) -> None:
        at_start.append(run.weights())
        batch = pending.batch
        for lag, past in enumerate(reversed(at_start)):
            with torch.no_grad():
                for name, parameter in scorer.model.named_parameters():
                    parameter.copy_(past[name])
            apart = (scorer.logprobs(batch, Ranks(), 1000) - batch.behavior_logp)[batch.mask].abs().max()
            if apart < 1e-3:
                found.append(lag)
                return
        found.append(-1)

    run.stages = replace(run.stages, keep=keep)
    for _ in loop(run.state, run.stages):
        pass
    return found


def run_of(**options: Any) -> Run:
    return build(sharp_policy(), RULE, **options)


@pytest.fixture(scope="module")
def undisturbed() -> Trace:
    run = run_of()
    return follow(run, Beside(run))


def equal(one: Trace, two: Trace) -> bool:
    return len(one) == len(two) and all(a == b and same(v, w) for (a, v), (b, w) in zip(one, two, strict=True))


def test_every_step_but_the_first_is_learnt_one_step_after_it_was_sampled(undisturbed: Trace) -> None:
    run = run_of()
    beside = Beside(run)
    assert lags(run, lambda state, stages: stale(state, stages, beside, steps=4)) == [0, 1, 1, 1]
    assert beside.published == [0, 0, 2, 4], "two updates a step; and nothing is sampled that nobody learns from"
    assert [record["staleness"] for record, _ in undisturbed] == [0.0, 1.0, 2.0, 3.0, 2.0, 3.0]


def test_another_lag_is_seen() -> None:
    """The measure above tells a lag of 0 (the synchronous loop) and one that grows (weights that never arrive)."""
    run = run_of()
    assert lags(run, lambda state, stages: online(state, stages, steps=4)) == [0, 0, 0, 0]
    run = run_of()
    forgetful = Forgetful(run)
    assert lags(run, lambda state, stages: stale(state, stages, forgetful, steps=4)) == [0, 1, 2, 3]


def test_weights_that_never_arrived_end_the_run() -> None:
    run = run_of()
    with pytest.raises(RuntimeError, match="used weights of versions"):
        follow(run, Late(run), steps=4)


def test_the_same_seed_gives_the_same_bits_however_slow_either_side_is(undisturbed: Trace) -> None:
    run = run_of()
    assert equal(follow(run, Beside(run, pause=0.05)), undisturbed)
    assert not same(undisturbed[0][1], undisturbed[-1][1])
    other = run_of(seed=1)
    assert not same(follow(other, Beside(other, seed=1))[-1][1], undisturbed[-1][1])
    synchronous = run_of()
    trace = [(record, synchronous.weights()) for record in online(synchronous.state, synchronous.stages, steps=STEPS)]
    assert equal(trace[:2], undisturbed[:2]) and not same(trace[-1][1], undisturbed[-1][1])


def test_answers_are_admitted_in_the_order_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where groups without variance are replaced by others."""

    def trace(kind: type[Beside]) -> Trace:
        run = run_of(varied=True)
        return follow(run, kind(run))

    expected = trace(Beside)
    assert equal(trace(Reversed), expected)
    monkeypatch.setattr(online_module, "in_order", lambda parts, groups: [item for part in parts for item in part])
    assert not equal(trace(Reversed), expected), "admission by arrival would not be noticed"


def saved_at_every_yield(folder: Path) -> tuple[Trace, list[Checkpoint]]:
    checkpoints = Checkpoints(folder, keep=YIELDS)
    whole: Trace = []
    saved: list[Checkpoint] = []
    run = run_of()
    for number, record in enumerate(stale(run.state, run.stages, Beside(run, pause=0.02), steps=STEPS)):
        saved.append(checkpoints.save(f"yield-{number}", run.snapshot(), partial(save, run.policy), order=number))
        whole.append((record, run.weights()))
    return whole, saved


def resumed(checkpoint: Checkpoint, state: Mapping[str, Any]) -> Trace:
    again = build(load(str(checkpoint.model)), RULE)
    again.load(state)
    return follow(again, Beside(again))


def test_every_yield_is_resumable(tmp_path: Path, undisturbed: Trace) -> None:
    whole, saved = saved_at_every_yield(tmp_path)
    assert equal(whole, undisturbed)
    # What is being sampled is in the checkpoint, also between two steps, and nothing is in the last one.
    assert [checkpoint.load()["loop"]["ahead"] is not None for checkpoint in saved] == [True] * 4 + [False] * 2
    for number, checkpoint in enumerate(saved):
        assert equal(resumed(checkpoint, checkpoint.load()), whole[number + 1 :]), f"after yield {number}"
    forgotten = saved[1].load()
    forgotten["loop"]["ahead"] = None
    assert not equal(resumed(saved[1], forgotten), whole[2:]), "a rollout sampled anew would not be noticed"


def test_what_was_sampled_ahead_is_not_learnt_from_by_a_run_that_goes_on_in_turn() -> None:
    """Nor, later, by one that samples ahead again: it would be as old as the steps between."""
    state = LoopState(ahead=Future())
    assert list(online(state, cast(Stages, None), steps=0)) == [] and state.ahead is None


def test_an_error_of_either_side_ends_the_loop() -> None:
    class Failing(Beside):
        def play(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Scored]:
            if step == 1:
                raise ZeroDivisionError("in the sampler")
            return super().play(asked, step)

    run = run_of()
    records = []
    with pytest.raises(ZeroDivisionError, match="in the sampler"):
        records += [record for record in stale(run.state, run.stages, Failing(run), steps=STEPS)]
    assert run.state.step == 1

    run = run_of()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("in the learner")

    run.stages = replace(run.stages, keep=broken)
    beside = Waiting(run)
    with pytest.raises(ZeroDivisionError, match="in the learner"):
        follow(run, beside)
    assert not beside.wanted.is_set(), "it waited for a rollout that nobody wants"
    beside.wanted.set()


# By the command line, with the process.

OVERLAPPED = ("task=sort", "warmup=1", "reward=length", "rollout.staleness=1", "steps=4", "save_every=1", "keep=9")
SIZE = ("prompts_per_rollout=2", "responses_per_prompt=2", "rollout.max_tokens=4", "eval.n=2", "optim.lr=1e-3", *QUIET)


def children() -> set[int]:
    """Sampling processes that are alive; the one that renders chat templates is none."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,stat,args"], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 3) for line in found.splitlines()[1:]]
    mine = {int(pid): args for pid, parent, state, args in lines if int(parent) == os.getpid() and state[0] != "Z"}
    return {pid for pid, args in mine.items() if not args.startswith("ps ") and "novarl.models.rendering" not in args}


def test_a_run_that_was_stopped_or_whose_sampler_was_killed_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = children()  # those that an earlier test's objects hold until they are collected
    finished("rl", *OVERLAPPED, *SIZE, "run_dir=whole")
    assert [row["staleness"] for row in deterministic_metrics(Path("whole")) if "staleness" in row] == [0, 1, 1, 1]
    assert not children() - before

    publish = FarSampler.publish

    def kill(self: FarSampler, version: int) -> None:
        publish(self, version)
        if version == 2:
            for pid in children() - before:
                os.kill(pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(FarSampler, "publish", kill)
        ended = novarl("rl", *OVERLAPPED, *SIZE, "run_dir=killed")
    assert ended.code == 2
    (message,) = [line for line in ended.err.splitlines() if line.startswith("novarl: ")]
    assert "the sampling process died unexpectedly: it was killed by SIGKILL" in message and "resume=auto" in message
    assert "Traceback" not in ended.err and not children() - before

    def interrupt(self: FarSampler, version: int) -> None:
        publish(self, version)
        if version == 2:
            os.kill(os.getpid(), signal.SIGINT)  # of Ctrl-C the sampler hears nothing: its group is its own

    with monkeypatch.context() as patch:
        patch.setattr(FarSampler, "publish", interrupt)
        ended = novarl("rl", *OVERLAPPED, *SIZE, "run_dir=stopped")
    assert ended.code == 130 and "Traceback" not in ended.err and not children() - before
    finished("rl", *OVERLAPPED, *SIZE, "run_dir=stopped", "resume=auto")
    assert deterministic_metrics(Path("stopped")) == deterministic_metrics(Path("whole"))
    assert same(weights(Path("stopped")), weights(Path("whole")))

    finished("rl", *OVERLAPPED, *SIZE, "run_dir=killed", "resume=auto")
    assert deterministic_metrics(Path("killed")) == deterministic_metrics(Path("whole"))
    assert same(weights(Path("killed")), weights(Path("whole")))


def test_a_killed_learner_takes_its_sampler_with_it(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "novarl", "rl", *OVERLAPPED, *SIZE, "steps=100000", "save_every=null"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "err", "w") as err:
        learner = subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=err)
    try:
        log = next(wait_for(lambda: [*tmp_path.glob("runs/rl-*/metrics.jsonl")]))[0]
        next(wait_for(lambda: log.read_text().count("staleness") >= 2))
        (keeper,) = descendants = children_of(learner.pid)
        descendants += children_of(keeper)
        assert len(descendants) == 2
    finally:
        learner.kill()
        learner.wait()
    next(wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in descendants)))
    assert "Traceback" not in (tmp_path / "err").read_text()


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout
    return [int(child) for child in found.split()]


def wait_for(condition: Any, seconds: float = 60.0) -> Any:
    """Yields the condition's value once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield value


def configured(*words: str) -> RLConfig:
    return load_config(RLConfig, overrides=["task=sort", "rollout.staleness=1", *words])


def test_threads_and_correction_follow_from_the_overlap() -> None:
    divided = {total: divided_threads(total, staleness=1, sampling=None) for total in (1, 2, 3, 4)}
    assert divided == {1: (1, 1), 2: (1, 1), 3: (2, 1), 4: (2, 2)}
    assert divided_threads(2, staleness=1, sampling=3) == (2, 3)
    assert divided_threads(2, staleness=0, sampling=None) == (2, 2)
    assert resolve_rl(configured()).correction == "token"
    assert resolve_rl(configured("correction.type=icepop")).correction == "icepop"
    assert resolve_rl(configured("adv.estimator=vtrace")).correction is None, "it would weigh tokens twice"
    explained = " ".join(finished("explain", "task=sort", "rollout.staleness=1").out.split())
    assert "Overlap: " in explained and "weights that are one step old" in explained
    assert "Correction: each token's loss is weighted by pi_old / mu, truncated at 2." in explained
    assert "Overlap" not in finished("explain", "task=sort").out


def test_overlap_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    ended = novarl("rl", "task=sort", "rollout.threads=2")
    assert ended.code == 2 and "rollout.staleness" in ended.err
    check_overlap(1, Ranks())
    with pytest.raises(NovaError, match="one training process"):
        check_overlap(1, Ranks(0, 2))
