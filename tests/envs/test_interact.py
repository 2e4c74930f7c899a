"""RL2's `interact`, from a user's file, with the reward function of the same file."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from novarl.core.errors import NovaError
from novarl.core.types import Prompt, Rollout, Sampling
from novarl.envs.episode import run_episode
from novarl.envs.interact import ToolFailed, Tools, load_interact
from novarl.rewards.compose import RewardSet
from novarl.rewards.registry import find_reward
from novarl.rewards.user_file import load

CODE = """
def interact(messages):
    text = messages[-1]["content"]
    print("noise")
    if text == "hang":
        while True: pass
    if text == "raise":
        raise ValueError("broken tool")
    if text == "shape":
        return [{"role": "wizard", "content": "x"}]
    if text == "number":
        return 3
    if not text.startswith("look"):
        return []
    return [{"role": "tool", "content": part} for part in text.split()[1:]]

def reward_fn(messages, answer):
    return float(messages[-1]["content"] == answer) + len(messages) / 100
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tools.py"
    file.write_text(CODE)
    return file


def play(path: Path, engine: Any, prompt: Prompt, *, turns: int = 4) -> Rollout:
    tools = load_interact(str(path), time_limit=0.5)
    sampling = Sampling(max_tokens=9)
    episode = run_episode(
        engine, tools(), prompt, tokenizer=engine.tokenizer, sampling=sampling, group=0, index=0, max_turns=turns
    )
    try:
        return asyncio.run(episode)
    finally:
        tools.close()


def test_tools_answer_until_none_is_called(path, tokenizer, scripted, ask) -> None:
    rollout = play(path, scripted(tokenizer, "look aa bb;", "hello;"), ask(tokenizer))
    assert [message["content"] for message in rollout.messages] == ["hi", "look aa bb", "aa", "bb", "hello"]
    assert tokenizer.decode(rollout.sequences[0].tokens) == "u:hi;a:look aa bb;t:aa;t:bb;a:hello;"
    assert (rollout.status, len(rollout.sequences)) == ("done", 1)
    rewards = RewardSet({"reward": load(str(path))})
    (scored,) = asyncio.run(rewards.score([rollout]))
    rewards.close()
    assert scored.reward == 1.05


def test_a_call_in_the_last_turn_is_cut_off(path, tokenizer, scripted, ask) -> None:
    rollout = play(path, scripted(tokenizer, "look aa;", "look bb;"), ask(tokenizer), turns=2)
    assert (rollout.status, rollout.finish_reason, rollout.text) == ("truncated", "turns", "look bb")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("hang;", "timed out after 0.5 s"),
        ("raise;", "broken tool"),
        ("shape;", "not a message with content and a role"),
        ("number;", "returned 3, not a list of messages"),
    ],
)
def test_a_failing_tool_fails_its_episode(path, tokenizer, scripted, ask, line: str, why: str) -> None:
    rollout = play(path, scripted(tokenizer, line), ask(tokenizer))
    assert rollout.status == "failed" and why in rollout.info["error"]


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("def reward_fn(messages, answer): return 1", "has no function 'interact'"),
        ("def interact(): return []", "interact must take the messages"),
        ("def interact(messages, tools): return []", "interact must take the messages"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
    ],
)
def test_mistakes_are_said_before_training(tmp_path: Path, code: str, what: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(code)
    with pytest.raises(NovaError, match=what):
        load_interact(str(file))
    with pytest.raises(NovaError, match="no such file"):
        load_interact(str(tmp_path / "none.py"))


SCORING = """
def interact(messages, answer):
    text = messages[-1]["content"]
    if text == "shape":
        return {"score": 1}
    if text == "number":
        return {"reward": "1"}
    right = text == answer
    again = [] if right else [{"role": "user", "content": "again"}]
    return {"reward": 1.0 if right else -0.25, "messages": again, "done": text == "stop" or right}
"""


@pytest.mark.parametrize(
    ("lines", "status", "reward"),
    [
        (("no;", "no;", "yes;"), "done", 0.5),
        (("yes;",), "done", 1.0),
        (("stop;",), "done", -0.25),
        (("no;",) * 4, "truncated", -1.0),
    ],
)
def test_an_environment_may_score(tmp_path: Path, tokenizer, scripted, ask, lines, status: str, reward: float) -> None:
    """`reward=environment` is the sum over the turns, the last one too."""
    file = tmp_path / "scoring.py"
    file.write_text(SCORING)
    prompt = replace(ask(tokenizer), answer="yes")
    rollout = play(file, scripted(tokenizer, *lines), prompt)
    assert (rollout.status, rollout.info["env_reward"]) == (status, reward)
    (scored,) = asyncio.run(RewardSet({"environment": find_reward("environment")}).score([rollout]))
    assert scored.reward == reward


@pytest.mark.parametrize(
    ("line", "why"), [("shape;", "returned the key 'score'; allowed are"), ("number;", "the reward '1', not")]
)
def test_a_score_that_is_none_fails_its_episode(tmp_path: Path, tokenizer, scripted, ask, line: str, why: str) -> None:
    file = tmp_path / "scoring.py"
    file.write_text(SCORING)
    rollout = play(file, scripted(tokenizer, line), ask(tokenizer))
    assert rollout.status == "failed" and why in rollout.info["error"]


SHARED = """
import asyncio, os

def interact(messages):
    while True: pass

waiting = 0

async def slowly(messages):
    global waiting
    waiting += 1
    while waiting < 20: await asyncio.sleep(0.01)
    return [{"role": "tool", "content": str(os.getpid())}]
"""


def ask_together(tools: Tools, episodes: int) -> list[Any]:
    """What every episode is answered, or the error it fails with."""

    async def all_at_once() -> list[Any]:
        said = ({"role": "user", "content": "?"},)
        return await asyncio.gather(*(tools().step(said) for _ in range(episodes)), return_exceptions=True)

    return asyncio.run(all_at_once())


def test_a_tool_that_always_hangs_is_not_waited_for_in_every_episode(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(SHARED)
    tools = load_interact(str(tmp_path / "tools.py"), time_limit=1.0)
    for _ in range(2):  # also in the next rollout phase, which has another event loop
        found = ask_together(tools, 24)
        assert all(isinstance(error, ToolFailed) for error in found)
        waited = [str(error) for error in found if "was skipped" not in str(error)]
        assert len(waited) <= 4, "the first, and the first and the last of those that came while it was busy"
        assert all("timed out after 1 s and was stopped" in said for said in waited)
    tools.close()


def test_async_tools_of_several_episodes_wait_side_by_side_and_end_when_closed(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(SHARED.replace("def interact", "def never").replace("slowly", "interact"))
    tools = load_interact(str(tmp_path / "tools.py"), time_limit=60.0)
    found = ask_together(tools, 20)
    assert len({step.messages[0]["content"] for step in found}) == 1, "each waited until all twenty did"
    worker = Path("/proc") / found[0].messages[0]["content"]
    assert worker.exists()
    tools.close()
    assert not worker.exists()
