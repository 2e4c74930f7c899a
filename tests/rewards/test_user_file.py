"""Rewards from users' files: both forms, every mistake before training, every failure after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from novarl.core.errors import NovaError
from novarl.core.types import Rollout, Scored, Sequence
from novarl.rewards.compose import RewardSet
from novarl.rewards.registry import find_reward
from novarl.rewards.user_file import load, split_spec

ROWS = """
    import os, sys, time

    print("noise on import")

    def reward_fn(messages, answer):
        text = messages[-1]["content"]
        print("noise", text, flush=True)
        os.write(1, b"noise of a C library\\n")
        if text == "hang":
            while True: pass
        if text == "sleep":
            time.sleep(60)
        if text == "raise":
            raise ValueError("this row is bad")
        if text == "exit":
            sys.exit(3)
        if text == "crash":
            os._exit(3)
        if text == "read":
            return input()
        if text == "say":
            return {"role": messages[0]["role"] == "user", "turns": len(messages)}
        odd = {"none": None, "nan": float("nan"), "str": "1.0", "object": object(), "list": [1.0]}
        return odd.get(text, text == answer)
"""


def score(reward: Any, rollouts: list[Rollout]) -> list[Scored]:
    rewards = RewardSet({"mine": reward})
    try:
        return asyncio.run(rewards.score(rollouts))
    finally:
        rewards.close()


def test_each_row_of_reward_fn_stands_alone(say, write) -> None:
    reward = load(f"{write(ROWS)}:reward_fn", time_limit=0.5)
    why = {
        "hang": "ran past its limit of 0.5 s",
        "sleep": "ran past its limit of 0.5 s",
        "raise": "raised ValueError: this row is bad\nTraceback",
        "exit": "raised SystemExit: 3",
        "crash": "ended its process with exit code 3",
        "read": "raised EOFError",
        "none": "returned None",
        "nan": "returned nan",
        "str": "returned '1.0', a str, not a number",
        "object": "a object",
        "list": "a list, not a number",
    }
    texts = [text for bad in why for text in (bad, "ok")]
    scored = score(reward, [say(text, "ok") for text in texts] + [say("other", "ok")])
    for item in scored:
        text = item.rollout.text
        if text in why:
            assert item.reward is None and item.rollout.status == "failed", text
            assert item.error is not None and why[text] in item.error
        else:
            assert item.reward == float(text == "ok"), "the rows around a failing one are scored"
    assert "mine.py" in next(item.error or "" for item in scored if item.rollout.text == "raise")


def test_a_row_may_give_several_rewards_by_name(say, write) -> None:
    (only,) = score(load(str(write(ROWS))), [say("say")])
    assert only.rewards == {"mine/role": 1.0, "mine/turns": 2.0} and only.reward == 3.0


def test_a_hanging_reward_is_ended_by_its_limit(say, write) -> None:
    reward = load(str(write(ROWS)), time_limit=1.0)
    (only,) = score(reward, [say("hang")])
    assert only.reward is None and "ran past its limit of 1 s and was stopped" in str(only.error)


ASYNC = """
    import asyncio

    waiting = 0

    async def reward_fn(messages, answer):
        global waiting
        text = messages[-1]["content"]
        if text == "hang":
            while True: pass
        if text == "twenty":
            waiting += 1
            while waiting < 20: await asyncio.sleep(0.01)
        await asyncio.sleep(3600 if text == "slow" else 0.01)
        return 1 / len(text)
"""


def test_async_rows_run_together_and_fail_apart(say, write) -> None:
    """Each of the twenty waits until all of them do."""
    reward = load(str(write(ASYNC)), time_limit=3.0)
    scored = score(reward, [say("twenty") for _ in range(20)] + [say("slow"), say("")])
    assert [item.reward for item in scored] == [1 / 6] * 20 + [None, None]
    assert "ran past its limit" in str(scored[20].error) and "ZeroDivisionError" in str(scored[21].error)


def test_an_async_row_that_never_waits_is_found_out(say, write) -> None:
    reward = load(str(write(ASYNC)), time_limit=1.0)
    (only,) = score(load(str(write(ASYNC)), time_limit=1.0), [say("hang")])
    assert only.reward is None and "ran past its limit of 1 s and was stopped" in str(only.error)
    scored = score(reward, [say("a"), say("hang"), say("ab")])
    assert [item.reward for item in scored] == [1.0, None, 0.5]


TRL = """
    import asyncio

    def reward_func(prompts, completions, answer, level, **columns):
        assert [p[0]["role"] for p in prompts] == ["user"] * len(completions)
        assert sorted(columns) == ["completion_ids", "topic"]
        return [float(c[0]["content"] == a) + l for c, a, l in zip(completions, answer, level)]

    async def later(completions):
        await asyncio.sleep(0)
        return [None if c[0]["content"] == "skip" else 1.0 for c in completions]

    def texts(prompts, completions):
        return [len(p) + len(c) / 100 for p, c in zip(prompts, completions)]

    def tokens(completions, completion_ids):
        return [ids[0] + ids[1] / 100 for ids in completion_ids]

    def short(completions, **columns):
        return [1.0]

    def number(completions, **columns):
        return 1.0

    def array(completions, **columns):
        import numpy
        return numpy.arange(len(completions))

    def hang(completions):
        while True: pass

    def only_columns(**columns):
        return [len(columns[name]) for name in ("prompts", "completions")]
"""


def test_trl_functions_get_the_batch_and_the_columns_they_name(say, write) -> None:
    path = write(TRL)
    rollouts = [say("yes", "yes", level=2, topic="a"), say("no", "yes", level=3, topic=None)]
    assert [item.reward for item in score(load(f"{path}:reward_func"), rollouts)] == [3.0, 3.0]
    assert [item.reward for item in score(load(f"{path}:array"), rollouts)] == [0.0, 1.0]
    assert [item.reward for item in score(load(f"{path}:only_columns"), rollouts)] == [2.0, 2.0]


def test_trl_functions_get_the_tokens_that_were_sampled(say, write) -> None:
    zeros = (0.0,) * 4
    sequence = Sequence((7, 8, 9, 5), (False, True, False, True), zeros, zeros, (0, 0, 0, 0))
    asked = replace(say("ab"), sequences=(sequence,))
    reward = load(f"{write(TRL)}:tokens", columns=[])
    assert [item.reward for item in score(reward, [asked, asked])] == [8.05, 8.05]


def test_trl_none_fails_one_rollout(say, write) -> None:
    scored = score(load(f"{write(TRL)}:later"), [say("skip"), say("x")])
    assert [item.reward for item in scored] == [None, 1.0]


def test_trl_plain_prompts_give_plain_strings(say, write) -> None:
    asked = say("xy")
    plain = replace(asked, prompt=replace(asked.prompt, conversational=False))
    scored = score(load(f"{write(TRL)}:texts"), [plain, asked])
    assert [item.reward for item in scored] == [len("a question about goodness") + 0.02, 1 + 0.01]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("short", "returned 1 scores for 2 rollouts"),
        ("number", "returned 1.0, not a list of scores"),
        ("hang", "ran past its limit of 0.3 s"),
    ],
)
def test_a_failing_batch_fails_whole(say, write, name: str, why: str) -> None:
    scored = score(load(f"{write(TRL)}:{name}", time_limit=0.3), [say("x"), say("y")])
    assert all(item.reward is None and why in str(item.error) for item in scored)


def refused(spec: str, **options: Any) -> str:
    """The one line with which a reward is refused."""
    with pytest.raises(NovaError) as error:
        load(spec, **options)
    line = str(error.value)
    assert "\n" not in line and "Traceback" not in line
    return line


def test_a_missing_file(tmp_path: Path) -> None:
    assert refused(f"{tmp_path}/none.py:f").startswith(f"{tmp_path}/none.py: no such file")
    (tmp_path / "folder.py").mkdir()
    assert "is a directory" in refused(f"{tmp_path}/folder.py")


@pytest.mark.parametrize("spec", ["", "reward", "file.txt:f", "file.py:", "file.py:1f", "file.py:a.b"])
def test_a_spec_that_names_no_function(spec: str) -> None:
    assert "does not name a function" in refused(spec)


def test_a_spec_in_parts() -> None:
    assert split_spec("a/b.py") == (Path("a/b.py"), "reward_fn")
    assert split_spec("C:/x:y/b.py:f") == (Path("C:/x:y/b.py"), "f")


def test_a_missing_name_suggests_the_nearest(write: Callable[..., Path]) -> None:
    path = write("import json\ndef reward_fn(messages, answer): return 1\nlimit = 3\n")
    assert refused(f"{path}:reward_fun") == f"{path}: has no function 'reward_fun' (did you mean 'reward_fn'?)"
    assert "its functions are: reward_fn" in refused(f"{path}:zzz")
    assert "has no function 'limit'" in refused(f"{path}:limit")


@pytest.mark.parametrize(
    ("code", "line", "what"),
    [
        ("x = 1\ndef reward_fn(messages, answer) return 1\n", 2, "SyntaxError"),
        ("x = 1\n\nimport no_such_module_at_all\n", 3, "ModuleNotFoundError"),
        ("def f():\n    return 1 / 0\n\nf()\n", 2, "ZeroDivisionError"),
        ("import sys\nsys.exit(7)\n", 2, "SystemExit: 7"),
    ],
)
def test_a_file_that_does_not_import_is_refused_with_its_line(write, code: str, line: int, what: str) -> None:
    path = write(code)
    message = refused(str(path))
    assert message.startswith(f"{path}:{line}: ") and what in message


def test_a_file_that_ends_the_process_while_importing(write) -> None:
    assert "ended its process with exit code 5" in refused(str(write("import os\nos._exit(5)\n")))


@pytest.mark.parametrize("signature", ["", "text", "a, b, c", "a, b, *, c", "prompts, answer", "*, messages, answer"])
def test_a_wrong_signature_is_refused_with_its_line(write, signature: str) -> None:
    path = write(f"\n\ndef reward_fn({signature}):\n    return 1\n")
    message = refused(str(path))
    assert message.startswith(f"{path}:3: reward_fn({signature.replace('*, ', '')}) has neither form of a reward")
    assert "reward_fn(messages, answer)" in message and "completions" in message


@pytest.mark.parametrize("signature", ["messages, answer, level", "messages, answer, *, level"])
def test_a_column_beside_the_answer_is_shown_the_form_of_the_batch(write, signature: str) -> None:
    message = refused(str(write(f"def reward_fn({signature}):\n    return 1\n")))
    assert "columns beside the answer need the batch's form: " in message
    assert "write reward_fn(completions, answer, level, **rest), or reward_fn(messages, answer)" in message
    path = write("def reward_fn(completions, answer, level, **rest):\n    return [1.0 for _ in completions]\n")
    load(str(path), columns=["answer", "level"]).close()
    assert "columns beside" not in refused(str(write("def reward_fn(text):\n    return 1\n")))


@pytest.mark.parametrize("signature", ["messages, answer", "m, a, strict=False", "*args", "m, a=None, *, k=1"])
def test_signatures_of_the_row_form(say, write, signature: str) -> None:
    path = write(f"def reward_fn({signature}):\n    return 1\n")
    assert score(load(str(path)), [say("x")])[0].reward == 1.0


def test_a_column_that_the_data_lacks_is_refused(write) -> None:
    path = write("def reward_fn(completions, solution):\n    return [1.0 for _ in completions]\n")
    assert "needs a column 'solution'" in refused(str(path), columns=["level"])
    load(str(path), columns=["solution"]).close()
    path = write("def reward_fn(completions, answer):\n    return [1.0 for _ in completions]\n")
    assert "needs a column 'answer'" in refused(str(path), columns=["level"])
    path = write("def reward_fn(completions, solution=None, **columns):\n    return [1.0 for _ in completions]\n")
    load(str(path), columns=[]).close()


def test_a_file_may_import_its_neighbours_and_shadow_nothing_of_ours(say, write) -> None:
    write("WORTH = 7\n", name="neighbour.py")
    path = write("import neighbour\ndef reward_fn(messages, answer): return neighbour.WORTH\n", name="json.py")
    assert score(load(str(path)), [say("x")])[0].reward == 7.0


def test_find_reward_knows_names_and_files(say, write) -> None:
    path = write("def reward_fn(messages, answer): return 1\n")
    assert score(find_reward(f"{path}:reward_fn"), [say("x")])[0].reward == 1.0
    assert score(find_reward("math"), [say("5", 5)])[0].reward == 1.0
    with pytest.raises(NovaError, match="did you mean length"):
        find_reward("lenght")
