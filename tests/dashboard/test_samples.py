"""Groups, filters, one prompt across steps, and searches over all steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from novarl.core.errors import NovaError
from novarl.dashboard import samples as module
from novarl.dashboard.runs import Run
from novarl.dashboard.samples import Filter, Samples, evenly
from novarl.observe.writer import RunWriter


def row(group: int, index: int, **given: Any) -> dict[str, Any]:
    text = given.pop("text", f"answer {index}")
    return {
        "prompt": f"question {group}",
        "text": text,
        "group": group,
        "index": index,
        "reward": float(index),
        **given,
    }


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    run = RunWriter(tmp_path / "a", writer="test")
    columns = {"tokens": [1, 2, 3], "pieces": ["a", "b", "c"], "advantages": [0.5, -1.0, 0.0], "logp": [-1.0] * 3}
    for step in (1, 2, 5):
        rows = [row(group, index) for group in range(3) for index in range(2)]
        rows[0] |= {"columns": columns, "finish_reason": "length", "status": "truncated"}
        rows[3] |= {"reward": None, "status": "failed", "error": "ValueError: Größe"}
        if step == 5:
            rows.append(row(3, 0, text="only Here"))
        run.rollouts(step, rows)
    return Samples(Run("a", tmp_path / "a", tmp_path))


def found(samples: Samples, **given: Any) -> list[int]:
    return [group["group"] for group in samples.groups(1, Filter(**given), 0, 50)["groups"]]


def test_pages_of_groups(samples: Samples) -> None:
    assert samples.steps() == [1, 2, 5]
    first = samples.groups(5, Filter(), 0, 3)
    assert [group["group"] for group in first["groups"]] == [0, 1, 2] and first["pages"] == 2
    assert [group["group"] for group in samples.groups(5, Filter(), 1, 3)["groups"]] == [3]
    assert first["finish_reasons"] == ["length", "none"] and first["statuses"] == ["done", "failed", "truncated"]
    assert first["groups"][1]["mean"] == 0.0, "the mean of the answers that have a reward"
    with pytest.raises(NovaError, match="step 3 were not logged"):
        samples.groups(3, Filter(), 0, 3)


def test_filters(samples: Samples) -> None:
    assert found(samples, text="QUESTION 1") == [1] and found(samples, text="größe") == [1]
    assert found(samples, reward_min=1) == [0, 2] and found(samples, reward_max=-1) == []
    assert found(samples, finish_reason="length") == [0] and found(samples, status="failed") == [1]
    assert found(samples, length_max=3) == [0], "tokens, or characters where none were recorded"


def test_a_group_has_its_columns_and_says_what_is_absent(samples: Samples) -> None:
    group = samples.group(1, 0, Filter(reward_min=1), tokens=2)
    whole, bare = group["answers"]
    assert whole["columns"]["pieces"] == ["a", "b"] and whole["length"] == 3
    assert "entropy" not in whole["columns"] and whole["columns"]["old_logp"] == [-1.0, -1.0]
    assert bare["columns"] == {} and bare["length"] is None and bare["advantage"] is None
    assert [answer["matches"] for answer in group["answers"]] == [False, True]
    assert group["scales"]["advantage"] == {"full": 0.5, "most": 1.0}
    with pytest.raises(NovaError, match="step 1 has no group 9"):
        samples.group(1, 9, Filter())


def test_a_step_that_was_written_again_is_read_again(samples: Samples) -> None:
    assert found(samples, text="question 1") == [1]
    RunWriter(samples.run.path, writer="test", extend=True).rollouts(1, [row(8, 0)])
    assert found(samples) == [8]


def test_one_prompt_across_steps(samples: Samples) -> None:
    across = samples.across("question 1")
    assert [entry["step"] for entry in across["steps"]] == [1, 2, 5] and across["searched"] == across["of"] == 3
    assert [answer["reward"] for answer in across["steps"][0]["answers"]] == [0.0, None]
    assert samples.across("question")["steps"] == [], "the whole prompt, not a part"


def test_a_long_run_is_searched_in_evenly_spaced_steps(samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    assert evenly(range(1, 101), 4) == [1, 34, 67, 100] and evenly([1, 2], 4) == [1, 2] and evenly([1, 2], 0) == []
    monkeypatch.setattr(module, "ACROSS", 2)
    across = samples.across("question 1")
    assert [entry["step"] for entry in across["steps"]] == [1, 5]
    assert (across["searched"], across["of"], across["logged"]) == (2, 2, 3)


def test_it_searches_in_slices_of_time(samples: Samples) -> None:
    first = samples.across("question 1", seconds=0)
    assert first["searched"] == 1 and first["of"] == 3
    assert samples.across("question 1", seconds=0)["searched"] == 2
    part = samples.find(Filter(text="only here"), after=0, backwards=False, seconds=0)
    assert part == {"step": None, "searched_to": 1}


def test_the_next_step_with_a_match(samples: Samples) -> None:
    assert samples.find(Filter(text="only here"), 0, False)["step"] == 5
    assert samples.find(Filter(text="only here"), 5, False) == {"step": None, "searched_to": None}
    assert samples.find(Filter(status="failed"), 5, True)["step"] == 2
    assert samples.find(Filter(text='say "x"'), 0, False)["step"] is None


def test_a_damaged_step_is_one_sentence(samples: Samples) -> None:
    file = samples.run.path / "rollouts/step-000002.jsonl"
    file.write_text('{"prompt": 1, "text"\n')
    with pytest.raises(NovaError, match=r"step-000002\.jsonl:1: not JSON"):
        samples.group(2, 0, Filter())
    file.write_text('{"messages": 5, "text": "x"}\n')
    with pytest.raises(NovaError, match="not an answer"):
        samples.groups(2, Filter(), 0, 5)
    assert [entry["step"] for entry in samples.across("question 1")["steps"]] == [1, 5]
