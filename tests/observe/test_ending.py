"""Signs of a collapse in metrics: each is seen where it is, and nothing where a run is healthy."""

from __future__ import annotations

from pathlib import Path

import pytest

from novarl.learn.optim import Optimizer
from novarl.observe.stability.ending import cannot_learn, findings, low_rate
from novarl.observe.summary import render_summary
from tests.compose.harness import ON_TASK, RL, SFT, events, finished, questions, summary, write_rows

ONE = ("rollout.max_tokens=1", "log.console=true")
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
    assert found.sign == "kl_explosion" and "2 of 24 updates" in found.said and "34 at update 3" in found.said
    assert findings(records, improved=True) == []


def test_a_policy_that_has_become_certain() -> None:
    (found,) = findings(run(entropy=0.01, zero_variance_groups=15.0), improved=False)
    assert found.sign == "entropy_collapse" and "entropy collapsed from 1 to 0.0" in found.said
    assert findings(run(entropy=0.01, zero_variance_groups=15.0), improved=True) == [], "it has learnt the task"
    assert findings(run(entropy=0.01), improved=False) == [], "groups still differ"
    assert findings(run(zero_variance_groups=15.0), improved=False) == [], "of a hard task; entropy stays"


def test_a_policy_that_comes_apart() -> None:
    (found,) = findings(run(entropy=4.0), improved=False)
    assert found.sign == "entropy_rise"
    sharp = [record | {"entropy": 0.02 + step / 200} for step, record in enumerate(run())]
    assert findings(sharp, improved=False) == [], "of a sharp policy, it has regained a little"


def test_what_only_some_updates_report_is_looked_for_in_all() -> None:
    records = run(truncated_fraction=0.9)
    del records[0]["truncated_fraction"]
    records[5]["kl"], records[7]["kl"] = float("nan"), 2.0
    assert [found.sign for found in findings(records, improved=False)] == ["kl_explosion", "length_drift"]


@pytest.mark.parametrize("improved", [True, False])
def test_answers_that_grow_to_their_limit_whatever_the_score_says(improved: bool) -> None:
    (found,) = findings(run(truncated_fraction=0.9), improved=improved)
    assert found.sign == "length_drift" and "2% at the start" in found.said
    always = [{**HEALTHY, "truncated_fraction": 0.9}] * 24
    assert findings(always, improved=improved) == [], "a limit that was too low from the start is another matter"


def test_a_run_with_far_too_large_steps_says_so(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finished("rl", *ON_TASK, "steps=3", "optim.lr=0.5", "entropy.coef=1", f"run_dir={run_dir}")
    found = summary(run_dir)
    page = " ".join(render_summary(found).split())
    assert [finding["sign"] for finding in found["findings"]].count("kl_explosion") == 1
    assert "Warnings:" in page and "moved the policy by more than 0.1 nats" in page
    assert f"optim.lr={found['usual_lr']:g} " in page and found["usual_lr"] < 0.01


def step(number: int = 1, **values: float) -> dict[str, float]:
    """One update of a step of 2 groups with 4 answers each, in which something is learnt."""
    healthy = {"zero_variance_groups": 0.0, "groups_kept": 2.0, "groups_dropped": 0.0, "episodes": 8.0}
    healthy |= {"truncated_fraction": 0.0, "grad_norm": 1.0, "reward_std": 1.0, "step": float(number)}
    return healthy | values


def test_what_keeps_a_run_from_learning_is_counted() -> None:
    """Two updates a step: groups and answers count once for each step, gradients once for each update."""
    dead = {"zero_variance_groups": 2.0, "truncated_fraction": 1.0, "grad_norm": 0.0, "reward_std": 0.0}
    records = [step(number, **dead) for number in (1, 1, 2, 2, 3, 3)]
    said = [finding.said for finding in cannot_learn(records, limit="max_new_tokens=10")]
    assert said == [
        "No learning signal: 6 of 6 groups had identical rewards",
        "Every answer was truncated at max_new_tokens=10",
        "The gradient was 0 in 6 of 6 updates",
    ]
    assert all(finding.cure for finding in cannot_learn(records))
    assert [finding.sign for finding in findings(records, improved=False)] == ["no_signal", "always_cut", "no_gradient"]
    assert [finding.sign for finding in findings(records, improved=True)] == ["always_cut"], "it did learn"


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([step(n, zero_variance_groups=2.0) for n in range(3)] + [step(3)], ["6 of 8 groups had identical rewards"]),
        ([step(n, zero_variance_groups=2.0) for n in range(2)] + [step(2)], []),
        ([step(n, truncated_fraction=1.0) for n in range(9)] + [step(9)], ["72 of 80 answers were truncated at"]),
        ([step(n, truncated_fraction=0.875) for n in range(9)], []),
        ([step(1, grad_norm=0.0), step(1)], ["The gradient was 0 in 1 of 2 updates"]),
        ([step(1, grad_norm=0.0), step(1), step(2)], []),
        ([{"grad_norm": 0.0, "loss": 1.0}] * 3, ["The gradient was 0 in 3 of 3 updates"]),
        ([{"value_loss": 1.0}], []),
    ],
)
def test_how_much_of_it_there_must_be(records: list[dict[str, float]], said: list[str]) -> None:
    found = cannot_learn(records)
    assert len(found) == len(said) and all(words in one.said for words, one in zip(said, found, strict=True))


def test_with_one_answer_to_each_prompt_the_step_is_the_group() -> None:
    alone = {"episodes": 2.0, "zero_variance_groups": 2.0}
    assert cannot_learn([step(n, **alone) for n in range(4)]) == []
    (found,) = cannot_learn([step(n, **alone, reward_std=0.0) for n in range(4)])
    assert found.said.endswith("4 of 4 groups had identical rewards")
    assert cannot_learn([step(n, episodes=1.0, groups_kept=1.0, reward_std=0.0) for n in range(4)]) == []


def test_a_learning_rate_that_is_too_low_for_so_few_updates() -> None:
    found = low_rate(1e-6, 3e-4, 48)
    assert found is not None
    assert found.said == (
        "The learning rate 1e-06 is too low for 48 updates: it is 300 times below the default for this model (0.0003)"
    )
    assert "optim.lr=0.0003" in found.cure
    assert low_rate(1e-6, 3e-4, 48_000) is None and low_rate(3e-4, 3e-4, 1) is None and low_rate(2e-4, 3e-4, 1) is None
    records = [step(n, lr=1e-5) for n in range(48)]
    assert low_rate(1e-5, 3e-4, 48) is None, "measured: train.py learns so"
    assert [one.sign for one in findings(records, improved=False, usual_lr=3e-4)] == ["low_lr"]
    assert findings(records, improved=True, usual_lr=3e-4) == findings(records, improved=False) == []


def alerts(run_dir: Path) -> list[tuple[int, str]]:
    return [(event["step"], event["message"]) for event in events(run_dir, "alert")]


def test_a_run_that_cannot_learn_says_so_by_the_fifth_step_and_at_its_end(tmp_path: Path) -> None:
    """Equal rewards everywhere, and answers that are all cut off; the gradient is 0 with them."""
    run_dir, reward = tmp_path / "run", tmp_path / "equal.py"
    reward.write_text("def equal(messages, answer):\n    return 1.0\n")
    ended = finished("rl", *ON_TASK, f"reward={reward}:equal", "steps=6", *ONE, f"run_dir={run_dir}")
    want = (
        "{} of {} groups had identical rewards",
        "Every answer was truncated at max_new_tokens=1",
        "was 0 in {} of {} up",
    )
    live = [message for at, message in alerts(run_dir) if at == 5 and "Usual fix" in message]
    assert len(live) == 3
    for words, message in zip(want, live, strict=True):
        assert words.format(*((10, 10) if "groups" in words else (5, 5))) in message and "Usual fix" in message
        assert message in ended.out
    found, page = summary(run_dir), ended.out[ended.out.index("\nTraining ended") :]
    assert [finding["sign"] for finding in found["findings"]] == ["no_signal", "always_cut", "no_gradient"]
    for words, finding in zip(want, found["findings"], strict=True):
        assert words.format(*((12, 12) if "groups" in words else (6, 6))) in finding["said"] and finding["cure"]
        assert finding["said"] in " ".join(page.split())
    assert "learned little or nothing" in page and "successfully" not in ended.out
    assert "rollout.max_tokens=" in page and found["status"] == "done"


def test_a_learning_rate_that_cannot_move_the_model_is_named_at_the_start(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finished("rl", *ON_TASK, "optim.lr=1e-7", f"run_dir={run_dir}")
    (message,) = [message for _, message in alerts(run_dir) if "learning rate" in message]
    assert "1e-07" in message and "below the default" in message and "Usual fixes" in message
    assert "low_lr" in [finding["sign"] for finding in summary(run_dir)["findings"]]


def test_supervised_runs_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every gradient 0, as where no token is trained."""
    monkeypatch.setattr(Optimizer, "step", lambda self: (0.0, 0.1))
    rows = write_rows(tmp_path / "rows.jsonl", questions())
    ended = finished("sft", f"data={rows}", *SFT, "steps=6", "log.console=true", f"run_dir={tmp_path / 'run'}")
    assert [message for at, message in alerts(tmp_path / "run") if at == 5 and "was 0 in 5 of 5 updates" in message]
    assert [finding["sign"] for finding in summary(tmp_path / "run")["findings"]] == ["no_gradient"]
    assert "learned little or nothing" in ended.out and "successfully" not in ended.out


def test_the_warm_up_is_announced_with_its_key_and_what_it_did_is_on_the_page(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ended = finished("rl", *ON_TASK, "log.console=true", f"run_dir={run_dir}")
    assert any("2 supervised warm-up steps" in message and "warmup=N" in message for _, message in alerts(run_dir))
    did = summary(run_dir)["warmup"]
    assert did["steps"] == 2 and did["loss"][1] < did["loss"][0] and len(did["accuracy"]) == 2
    assert f"Warm-up: 2 supervised steps, loss {did['loss'][0]:.3g} → {did['loss'][1]:.3g}" in ended.out
    finished("rl", "task=sort", "warmup=0", *RL, f"run_dir={tmp_path / 'none'}")
    assert summary(tmp_path / "none")["warmup"] is None and not any("warm" in m for _, m in alerts(tmp_path / "none"))


def test_a_single_update_is_in_the_singular() -> None:
    (found,) = findings([{"kl": 34.0}], improved=False)
    assert found.said.startswith("1 of 1 update was too large: it moved the policy by more than")
