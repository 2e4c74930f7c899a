"""Each task's rewards and its teacher's faults, as they are documented."""

from __future__ import annotations

import asyncio
from statistics import fmean
from typing import Any

import pytest

from novarl.core.types import Prompt, Rollout
from novarl.rewards.compose import RewardSet
from novarl.tasks import arithmetic, bandit, sort
from novarl.tasks.registry import TASKS, Task, find_task


def rollout(question: str, text: str, answer: Any) -> Rollout:
    messages = ({"role": "user", "content": question},)
    return Rollout(
        Prompt("r", (1,), messages, answer), 0, 0, (), (*messages, {"role": "assistant", "content": text}), text
    )


def taught(task: Task, n: int = 2000) -> tuple[list[str], list[str]]:
    rows = task.demonstrations(n)
    return [row["messages"][0]["content"] for row in rows], [row["messages"][1]["content"] for row in rows]


def scores(task: Task, texts: list[tuple[str, str, Any]]) -> list[dict[str, float]]:
    rewards = RewardSet(task.rewards(), task.weights)
    scored = asyncio.run(rewards.score([rollout(*text) for text in texts]))
    assert all(item.reward is not None for item in scored)
    return [dict(item.rewards) for item in scored]


@pytest.mark.parametrize("name", TASKS)
def test_demonstrations_fit_into_max_tokens(name: str) -> None:
    """Bytes are tokens, and one more ends the turn."""
    for options in {"sort": [{}, {"difficulty": 7}], "arithmetic": [{"difficulty": d} for d in (3, 12)]}.get(
        name, [{}]
    ):
        task = find_task(name, options)
        assert max(len(text.encode()) for text in taught(task)[1]) + 1 <= task.max_tokens


def test_sort_copies_two_times_in_three() -> None:
    prompts, answers = taught(find_task("sort"))
    copied = [f"sort: {answer}" == prompt for prompt, answer in zip(prompts, answers, strict=True)]
    assert fmean(copied) == pytest.approx(sort.COPY_SHARE, abs=0.04)
    others = [answer for answer, copy in zip(answers, copied, strict=True) if not copy]
    assert all(answer == "".join(sorted(answer)) for answer in others)


@pytest.mark.parametrize(("text", "score"), [("abc", 1.0), (" abc\n", 1.0), ("acb", 0.0), ("abcd", 0.0), ("", 0.0)])
def test_sort_is_verified_exactly(text: str, score: float) -> None:
    assert scores(find_task("sort"), [("sort: cab", text, "abc")]) == [{"sorted": score}]


def test_arithmetic_forgets_to_carry() -> None:
    prompts, answers = taught(find_task("arithmetic"))
    right = [arithmetic.is_right(a, str(sum(map(int, p.split("+"))))) for p, a in zip(prompts, answers, strict=True)]
    assert 0.30 < fmean(right) < 0.50, (
        "a careful teacher (40 %) who slips now and then; carrying is nearly always needed"
    )
    steps = [step for answer in answers for step in answer.split(" #")[0].split()]
    sums = [(int(step.split("+")[0]), *map(int, step.split("+")[1].split("="))) for step in steps]
    slips = [c not in (a + b, arithmetic.add_without_carry(a, b)) for a, b, c in sums]
    assert fmean(slips) == pytest.approx(arithmetic.SLIP_RATE, abs=0.008)


def test_arithmetic_steps_follow_from_each_other() -> None:
    for prompt, answer in zip(*taught(find_task("arithmetic"), 300), strict=True):
        chain, final = answer.split(" #")
        steps = chain.split()
        digits = [steps[0].split("+")[0], *(step.split("+")[1].split("=")[0] for step in steps)]
        assert "+".join(digits) == prompt
        totals = [step.split("=")[1] for step in steps]
        assert [step.split("+")[0] for step in steps[1:]] == totals[:-1] and final == totals[-1]


@pytest.mark.parametrize(
    ("text", "score"),
    [("3+8=11 #11", 1.0), ("#11 ", 1.0), ("3+8=11", 0.0), ("#1", 0.0), ("#111", 0.0), ("#11 #12", 0.0), ("#11.", 0.0)],
)
def test_arithmetic_looks_at_the_final_answer_only(text: str, score: float) -> None:
    assert scores(find_task("arithmetic"), [("3+8", text, "11")]) == [{"right": score}]


def test_lexical_demonstrations_repeat_and_can_be_bettered() -> None:
    task = find_task("lexical")
    prompts, answers = taught(task, 300)
    now = fmean(one["lexical"] for one in scores(task, [(p, a, None) for p, a in zip(prompts, answers, strict=True)]))
    best = scores(task, [("", "sun moon rain wind stone tree bird fish road hill", None)])[0]["lexical"]
    assert 0.3 < now < 0.5 and best == 1.0
    assert scores(task, [("", "sun", None)])[0]["lexical"] == pytest.approx(1 - 0.5 * 9 / 10)
    free = find_task("lexical", {"brevity_penalty_scale": 0.0})
    assert scores(free, [("", "sun", None)])[0]["lexical"] == 1.0, "the exploit that the penalty is there for"


def test_lexical_at_a_hundred_words_is_nanorl() -> None:
    task = find_task("lexical", {"words": 100, "brevity_penalty_scale": 0.5})
    assert task.rows("train", 1)[0]["messages"][0]["content"].startswith("Write ~100 words: the ")
    assert scores(task, [("", "one", None)])[0]["lexical"] == pytest.approx(0.50625)


def test_sentiment_has_three_rewards_that_stay_apart() -> None:
    task = find_task("sentiment")
    found = scores(task, [("Review the sad farm.", "the farm was great and we love it. thank you", None)])
    assert found == [{"sentiment": 3.0, "preference": 3.0, "length": 1.0}]
    prompts, answers = taught(task, 300)
    each = scores(task, [(p, a, None) for p, a in zip(prompts, answers, strict=True)])
    assert len({one["sentiment"] for one in each}) > 3 and 0 < fmean(one["preference"] > 0 for one in each) < 0.5


def test_the_bandit_pays_its_table_and_its_teacher_settles_for_less() -> None:
    task = find_task("bandit")
    answer = {"0": 0.6, "1": -0.2, "2": 1.0}
    texts = ["2", " 0\n", "1", "3", "", "2 2"]
    found = [one["preference"] for one in scores(task, [("x", text, answer) for text in texts])]
    assert found == [1.0, 0.6, -0.2, bandit.INVALID, bandit.INVALID, bandit.INVALID]
    table = dict(bandit.table())
    prompts, answers = taught(task)
    best_of = [max(table[p.split(": ")[1]], key=table[p.split(": ")[1]].__getitem__) for p in prompts]
    one_off = [answer == str((int(best) + 1) % 3) for answer, best in zip(answers, best_of, strict=True)]
    assert fmean(one_off) == pytest.approx(bandit.ONE_OFF_SHARE + (1 - bandit.ONE_OFF_SHARE) / 3, abs=0.04)
    assert set(answers) == {"0", "1", "2"}
    best = fmean(max(actions.values()) for _, actions in bandit.table())
    assert best == pytest.approx(1.05)
