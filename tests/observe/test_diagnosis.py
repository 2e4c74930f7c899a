"""Signs of a collapse in metrics: each is seen where it is, and nothing where a run is healthy."""

from __future__ import annotations

from pathlib import Path

import pytest

from novarl.observe.diagnosis import findings
from novarl.observe.summary import render_summary
from tests.build.harness import ON_TASK, finished, summary

HEALTHY = {
    "kl": 1e-3,
    "entropy": 1.0,
    "groups_kept": 16.0,
    "zero_variance_groups": 4.0,
    "truncated_fraction": 0.02,
}


def run(steps: int = 24, **last: float) -> list[dict[str, float]]:
    """Metrics that move evenly from healthy ones to `last`."""
    return [
        {name: value + (last.get(name, value) - value) * step / (steps - 1) for name, value in HEALTHY.items()}
        for step in range(steps)
    ]


@pytest.mark.parametrize("improved", [True, False])
def test_nothing_stands_out_in_a_healthy_run(improved: bool) -> None:
    assert findings(run(), improved=improved) == []
    assert findings([], improved=improved) == []
    assert findings([{"loss": 1.0}], improved=improved) == []


def test_a_far_step_is_named_by_its_number() -> None:
    records = run()
    records[2]["kl"], records[20]["kl"] = 33.9, 0.2
    (found,) = findings(records, improved=False)
    assert found.sign == "far" and "2 of 24 updates" in found.said and "the 3rd by 34" in found.said
    assert findings(records, improved=True) == []


def test_a_policy_that_has_become_certain() -> None:
    (found,) = findings(run(entropy=0.01, zero_variance_groups=15.0), improved=False)
    assert found.sign == "certain" and "entropy went from 1 to 0.0" in found.said
    assert findings(run(entropy=0.01, zero_variance_groups=15.0), improved=True) == [], "it has learnt the task"
    assert findings(run(entropy=0.01), improved=False) == [], "groups still differ"
    assert findings(run(zero_variance_groups=15.0), improved=False) == [], "of a hard task; entropy stays"


def test_a_policy_that_comes_apart() -> None:
    (found,) = findings(run(entropy=4.0), improved=False)
    assert found.sign == "unsure"
    sharp = [record | {"entropy": 0.02 + step / 200} for step, record in enumerate(run())]
    assert findings(sharp, improved=False) == [], "of a sharp policy, it has regained a little"


def test_what_only_some_updates_report_is_looked_for_in_all() -> None:
    records = run(truncated_fraction=0.9)
    del records[0]["truncated_fraction"]
    records[5]["kl"], records[7]["kl"] = float("nan"), 2.0
    assert [found.sign for found in findings(records, improved=False)] == ["far", "cut"]


@pytest.mark.parametrize("improved", [True, False])
def test_answers_that_grow_to_their_limit_whatever_the_score_says(improved: bool) -> None:
    (found,) = findings(run(truncated_fraction=0.9), improved=improved)
    assert found.sign == "cut" and "at first 2%" in found.said
    always = [{**HEALTHY, "truncated_fraction": 0.9}] * 24
    assert findings(always, improved=improved) == [], "a limit that was too low from the start is another matter"


def test_a_run_with_far_too_large_steps_says_so(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finished("rl", *ON_TASK, "steps=3", "optim.lr=0.5", "entropy.coef=1", f"run_dir={run_dir}")
    found = summary(run_dir)
    page = " ".join(render_summary(found).split())
    assert [finding["sign"] for finding in found["findings"]].count("far") == 1
    assert "What stands out:" in page and " updates moved the policy by more than 0.1 nats" in page
    assert f"optim.lr={found['usual_lr']:g} " in page and found["usual_lr"] < 0.01
