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
from novarl.rewards.services import Progress
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
        "hang": "timed out after 0.5 s",
        "sleep": "timed out after 0.5 s",
        "raise": "raised ValueError: this row is bad\nTraceback",
        "exit": "raised SystemExit: 3",
        "crash": "exited with code 3",
        "read": "raised EOFError",
        "none": "returned None",
        "nan": "returned nan",
        "str": "returned '1.0', a str, not a number",
        "object": "of type object",
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
    assert only.reward is None and "timed out after 1 s and was stopped" in str(only.error)


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
    assert "timed out after" in str(scored[20].error) and "ZeroDivisionError" in str(scored[21].error)


def test_an_async_row_that_never_waits_is_found_out(say, write) -> None:
    reward = load(str(write(ASYNC)), time_limit=1.0)
    (only,) = score(load(str(write(ASYNC)), time_limit=1.0), [say("hang")])
    assert only.reward is None and "timed out after 1 s and was stopped" in str(only.error)
    scored = score(reward, [say("a"), say("hang"), say("ab")])
    assert [item.reward for item in scored] == [1.0, None, 0.5]


TRL = """
    import asyncio

    def reward_func(prompts, completions, answer, level, **columns):
        assert [p[0]["role"] for p in prompts] == ["user"] * len(completions)
        assert sorted(columns) == ["completion_ids", "log_extra", "log_metric", "topic", "trainer_state"]
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
        ("short", "returned 1 score for 2 rollouts"),
        ("number", "returned 1.0, not a list of scores"),
        ("hang", "timed out after 0.3 s"),
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
    assert "exited with code 5" in refused(str(write("import os\nos._exit(5)\n")))


@pytest.mark.parametrize(
    "signature", ["", "x", "a, b, c", "a, b, *, c", "prompts, answer", "m, a", "*args", "*args, **kwargs", "answer"]
)
def test_a_function_that_cannot_see_the_answer_is_refused_with_its_line(write, signature: str) -> None:
    path = write(f"\n\ndef reward_fn({signature}):\n    return 1\n")
    message = refused(str(path))
    shown = signature.replace("*, ", "")
    assert message.startswith(f"{path}:3: reward_fn({shown}) has no parameter for the policy's answer"), message
    assert "reward_fn(messages, answer)" in message and "completions" in message


def test_a_misspelt_parameter_is_recognised(write) -> None:
    message = refused(str(write("def reward_fn(mesages, answer):\n    return 1\n")))
    assert "did you mean 'messages' instead of 'mesages'?" in message


@pytest.mark.parametrize(
    "signature", ["messages, answer", "messages, answer=None, *, k=1", "messages", "*, messages, answer"]
)
def test_signatures_of_the_row_form(say, write, signature: str) -> None:
    path = write(f"def reward_fn({signature}):\n    return len(messages)\n")
    assert score(load(str(path)), [say("x")])[0].reward == 2.0


@pytest.mark.parametrize(
    "signature",
    [
        "completion, answer",
        "response, /, answer",
        "text",
        "solution_str, **kwargs",
        "answer, response",
        "output, answer=0",
    ],
)
def test_a_function_of_text_receives_text(say, write, signature: str) -> None:
    name = next(word.strip() for word in signature.split(",") if word.strip() not in ("answer", "/", "**kwargs"))
    path = write(
        f"def reward_fn({signature}):\n    assert isinstance({name}, str)\n    return float({name} == 'four')\n"
    )
    scored = score(load(str(path), columns=["answer"]), [say("four", "4"), say("five", "4")])
    assert [item.reward for item in scored] == [1.0, 0.0]


def test_columns_beside_the_answer_reach_a_function_of_one_rollout(say, write) -> None:
    path = write("""
        def reward_fn(messages, answer, level, *, topic="none"):
            return level + (topic == "sums") / 10 + (answer == "4") / 100
    """)
    rollouts = [say("x", "4", level=2, topic="sums"), say("x", "5", level=3)]
    assert [item.reward for item in score(load(str(path)), rollouts)] == pytest.approx([2.11, 3.0])
    assert "needs the column 'level'" in refused(str(path), columns=["answer", "topic"])


def test_a_text_parameter_beside_messages_is_a_column(say, write) -> None:
    path = write("def reward_fn(messages, response):\n    return float(messages[-1]['content'] == response)\n")
    assert score(load(str(path), columns=["response"]), [say("a", response="a")])[0].reward == 1.0
    assert "needs the column 'response'" in refused(str(path), columns=[])


VERL = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert data_source == "sums" and isinstance(solution_str, str)
        return {"score": float(ground_truth in solution_str), "split": float(extra_info["split"] == "train")}
"""


def test_verl_compute_score_is_given_verl_columns(say, write) -> None:
    reward_model = {"style": "rule", "ground_truth": "4"}
    row = {"data_source": "sums", "reward_model": reward_model, "extra_info": {"split": "train"}}
    columns = ["data_source", "reward_model", "reward_model.ground_truth", "extra_info", "extra_info.split"]
    reward = load(f"{write(VERL)}:compute_score", columns=columns)
    assert reward.reads == {"data_source", "ground_truth", "extra_info", "reward_model"}
    scored = score(reward, [say("so 4", **row), say("so 5", **row)])
    assert [item.rewards for item in scored] == [
        {"mine/score": 1.0, "mine/split": 1.0},
        {"mine/score": 0.0, "mine/split": 1.0},
    ]
    assert "needs the column 'data_source'" in refused(f"{write(VERL)}:compute_score", columns=columns[1:])


@pytest.mark.parametrize(
    ("columns", "near"),
    [
        (["solution", "level"], "solution"),
        (["level", "ground_truth"], "ground_truth"),
        (["reward_model", "reward_model.style", "reward_model.ground_truth"], "reward_model.ground_truth"),
        (["extra_info", "extra_info.answer", "solution"], "extra_info.answer"),
        (["answers"], "answers"),
        (["instruction", "input", "output"], "output"),
        (["completion", "source"], "completion"),
    ],
)
def test_a_missing_answer_is_refused_with_the_nearest_column(write, columns: list[str], near: str) -> None:
    for form in ("messages, answer", "response, answer", "completions, answer, **kwargs"):
        message = refused(str(write(f"def reward_fn({form}):\n    return 0.0\n")), columns=columns)
        assert "reward_fn needs the column 'answer', which the data does not have" in message
        assert f"did you mean the column {near!r}? set answer_key={near}" in message, message
    with pytest.raises(NovaError, match=f"reward=math.*set answer_key={near}"):
        find_reward("math", columns=columns)


def test_a_missing_answer_without_any_like_it(write) -> None:
    message = refused(str(write("def reward_fn(messages, answer):\n    return 0.0\n")), columns=["level"])
    assert "columns besides the prompt: level; if the reward does not need it, write answer=None" in message


def test_a_column_that_the_data_lacks_is_refused(write) -> None:
    path = write("def reward_fn(completions, solution):\n    return [1.0 for _ in completions]\n")
    assert "needs the column 'solution'" in refused(str(path), columns=["level"])
    assert "did you mean 'answer'? rename the parameter to answer" in refused(str(path), columns=["answer"])
    assert "did you mean 'solutions'? rename the parameter" in refused(str(path), columns=["solutions"])
    assert "set answer_key=info.solution and rename the parameter to answer" in refused(
        str(path), columns=["info", "info.solution"]
    )
    load(str(path), columns=["solution"]).close()
    path = write("def reward_fn(completions, answer):\n    return [1.0 for _ in completions]\n")
    assert "needs the column 'answer'" in refused(str(path), columns=["level"])
    path = write("def reward_fn(completions, solution=None, **columns):\n    return [1.0 for _ in completions]\n")
    load(str(path), columns=[]).close()
    path = write("def reward_fn(completions, environments):\n    return [1.0 for _ in completions]\n")
    assert "use rollout.env_path" in refused(str(path), columns=["level"])


SERVICES = """
    def overlong(limit):
        def soft_overlong(completion_ids, **kwargs):
            return [-1.0 if len(ids) > limit else 0.0 for ids in completion_ids]
        return soft_overlong

    class Repeats:
        def __call__(self, completion_ids, **kwargs):
            return [float(len(ids) - len(set(ids))) for ids in completion_ids]

    closure, instance = overlong(1), Repeats()

    def curriculum(completions, trainer_state):
        return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

    def other_state(completions, trainer_state=None, **kwargs):
        return [trainer_state.epoch]

    def logs(completions, answer, log_extra=None, log_metric=None, **kwargs):
        texts = [c[0]["content"] for c in completions]
        log_extra("extracted", texts)
        log_metric("accuracy", sum(t == a for t, a in zip(texts, answer)) / len(texts))
        return [1.0 if t != "skip" else None for t in texts]

    async def later(prompts, completions, log_metric, **kwargs):
        log_metric("waited", 2)
        log_metric("waited", 4)
        return [1.0 for _ in completions]

    def short(completions, log_extra):
        log_extra("extracted", ["one"])
        return [1.0 for _ in completions]

    def bad(completions, log_metric):
        log_metric("accuracy", float("nan"))
        return [1.0 for _ in completions]

    def row(completion, trainer_state, log_extra):
        log_extra("said", [completion])
        return trainer_state.global_step
"""


def test_trl_closures_and_instances_run_on_tokens_alone(say, write) -> None:
    zeros = (0.0,) * 4
    sequence = Sequence((7, 8, 8, 8), (False, True, True, True), zeros, zeros, (0, 0, 0, 0))
    asked, path = replace(say("ab"), sequences=(sequence,)), write(SERVICES)
    assert score(load(f"{path}:closure", columns=[]), [asked])[0].reward == -1.0
    assert score(load(f"{path}:instance", columns=[]), [asked])[0].reward == 2.0


def test_trainer_state_says_how_far_the_run_is(say, write) -> None:
    progress = Progress(step=3, steps=12)
    for name, expected in (("curriculum", 0.25), ("row", 3.0)):
        reward = load(f"{write(SERVICES)}:{name}", columns=[], progress=progress)
        assert score(reward, [say("x")])[0].reward == expected
    (only,) = score(load(f"{write(SERVICES)}:other_state", columns=[]), [say("x")])
    assert only.reward is None and "trainer_state has only global_step and max_steps, not 'epoch'" in str(only.error)


def test_what_a_reward_logs_is_kept_with_its_rollouts(say, write) -> None:
    first, second = score(load(f"{write(SERVICES)}:logs"), [say("a", "a"), say("skip", "b")])
    assert (first.reward, first.extra, first.metrics) == (1.0, {"extracted": "a"}, {"accuracy": 0.5})
    assert (second.reward, second.extra, second.metrics) == (None, {"extracted": "skip"}, {"accuracy": 0.5})
    (only,) = score(load(f"{write(SERVICES)}:later"), [say("a")])
    assert (only.reward, only.extra, only.metrics) == (1.0, {}, {"waited": 3.0})
    (only,) = score(load(f"{write(SERVICES)}:row", progress=Progress(1, 2)), [say("a")])
    assert (only.reward, only.extra) == (1.0, {"said": "a"})


@pytest.mark.parametrize(("name", "why"), [("short", "was given 1 values for 2 rollouts"), ("bad", "was given nan")])
def test_what_cannot_be_logged_fails_the_batch(say, write, name: str, why: str) -> None:
    scored = score(load(f"{write(SERVICES)}:{name}"), [say("x"), say("y")])
    assert all(item.reward is None and why in str(item.error) for item in scored)


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
