"""Continuations of an answer as a reward sees them: whole answers, in text and in tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from novarl.core.errors import NovaError
from novarl.core.event_loop import EventLoop
from novarl.core.types import Completion, Prompt, Rollout, Sampling
from novarl.distributed.ranks import Ranks
from novarl.learn.vine import Estimate, State
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.rewards.compose import RewardSet
from novarl.rewards.user_file import FileReward, load
from novarl.rewards.verdict import Failure, Scorer, Verdict
from novarl.run.continuations import Continue
from novarl.run.judge import Judge
from tests.compose.harness import ON_TASK, finished, metrics

TOKENIZER = ByteTokenizer()
PROMPT = Prompt("p", tuple(b"ask:"), ({"role": "user", "content": "ask:"},))
SAMPLES = 2
MOST = 8


class Engine:
    """Goes on with what is written for a beginning, and remembers how it was asked."""

    def __init__(self, written: Mapping[bytes, bytes]) -> None:
        self.written = written
        self.asked: dict[bytes, Sampling] = {}

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, key: str) -> Completion:
        begin = bytes(tokens[len(PROMPT.tokens) :])
        self.asked[begin] = sampling
        new = (*self.written[begin], TOKENIZER.eos_token_id)
        zeros = (0.0,) * len(new)
        return Completion(new, zeros, zeros, (0,) * len(new), "stop")


def estimates(written: Mapping[bytes, bytes], reward: Scorer, engine: Engine | None = None) -> list[Estimate]:
    """Of the states that begin as `written` does."""
    engine = engine or Engine(written)
    loop = EventLoop()
    sampler: Any = SimpleNamespace(
        engine=engine, tokenizer=TOKENIZER, sampling=Sampling(max_tokens=MOST, stop=("gh",)), seed=0, loop=loop
    )
    judge = Judge([], sampler, RewardSet({"mine": reward}), Ranks(), Sampling(), 1)
    ends = (TOKENIZER.eos_token_id,)
    continued = Continue(sampler, judge, samples=SAMPLES, max_tokens=MOST, ends=ends, apply_chat_template=True)
    try:
        return continued([State(PROMPT, tuple(begin)) for begin in written], 0)
    finally:
        loop.close()


@pytest.fixture
def of_ids(tmp_path: Path) -> Iterator[FileReward]:
    """A reward of the user's own, of TRL's form: 1000 for each token, and the sum of their ids."""
    path = tmp_path / "mine.py"
    body = "return [1000 * len(ids) + sum(ids) for ids in completion_ids]"
    path.write_text(f"def of_ids(completions, completion_ids, **columns):\n    {body}\n")
    reward = load(f"{path}:of_ids")
    yield reward
    reward.close()


def test_a_reward_sees_the_tokens_of_the_whole_answer(of_ids: FileReward) -> None:
    """As of an ordinary rollout: none of the prompt's, those of the state, and eos at the end."""
    found = estimates({b"": b"abc", b"ab": b"c"}, of_ids)
    ids = (*b"abc", TOKENIZER.eos_token_id)
    wanted = 1000.0 * len(ids) + sum(ids)
    assert [(estimate.value, estimate.std) for estimate in found] == [(wanted, 0.0)] * 2
    assert [estimate.tokens for estimate in found] == [4 * SAMPLES, 2 * SAMPLES], "what the state has costs nothing"


def test_the_engine_knows_what_is_answered_already() -> None:
    """So that a stop string may begin in it; the limit is that of the whole answer."""

    async def reward(rollouts: Sequence[Rollout]) -> list[float]:
        return [1.0] * len(rollouts)

    engine = Engine({b"": b"abc", b"ag": b"h"})
    estimates(engine.written, reward, engine)
    asked = {begin: (sampling.answered, sampling.max_tokens) for begin, sampling in engine.asked.items()}
    assert asked == {b"": (0, MOST), b"ag": (2, MOST - 2)}
    assert all(sampling.stop == ("gh",) for sampling in engine.asked.values())


def test_a_reward_that_fails_for_all_of_a_state_says_why_in_a_line() -> None:
    async def reward(rollouts: Sequence[Rollout]) -> list[Verdict]:
        reasons = {"abc": None, "xyz": "raised KeyError: 'answer'"}
        wanted = [reasons[rollout.text] for rollout in rollouts]
        return [1.0 if why is None else Failure(f"{why} ({n})", "Traceback\n  ...") for n, why in enumerate(wanted)]

    with pytest.raises(NovaError) as caught:
        estimates({b"": b"abc", b"x": b"yz"}, reward)
    cause = f"to prompt p: reward 'mine' raised KeyError: 'answer' ({SAMPLES}) "
    assert cause in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


def test_a_failure_among_others_is_left_out() -> None:
    async def reward(rollouts: Sequence[Rollout]) -> list[Verdict]:
        return [Failure("no") if rollout.index == 0 else 0.5 for rollout in rollouts]

    assert [(found.value, found.std) for found in estimates({b"": b"abc"}, reward)] == [(0.5, 0.0)]


def test_a_policy_that_waits_for_its_critic_has_the_whole_schedule(tmp_path: Path) -> None:
    """Its learning rate begins to fall when it begins to learn, and ends where `optim.min_lr_ratio` says."""
    words = ("algo=ppo", "updates_per_rollout=1", "critic.warmup_steps=2", "steps=4", "optim.lr=1e-3")
    finished("rl", *ON_TASK, *words, "optim.schedule=linear", f"run_dir={tmp_path / 'run'}")
    learnt = [record for record in metrics(tmp_path / "run") if record["phase"] == "rl"]
    assert [record.get("lr") for record in learnt] == [None, None, 1e-3, 5e-4]
    assert [record["critic_lr"] for record in learnt] == [1e-3, 7.5e-4, 5e-4, 2.5e-4]
