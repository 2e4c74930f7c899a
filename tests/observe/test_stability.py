"""Alerts about metrics: each fault raises its own, once, and a healthy run raises none."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from novarl.observe.glossary import lookup
from novarl.observe.stability import RULES, Watch, review
from novarl.observe.stability.rules import TRAINING
from novarl.observe.stability.watch import CLEAR
from novarl.observe.summary import CANNOT_LEARN
from tests.compose.harness import ON_TASK, events, finished, metrics

Records = list[dict[str, float]]


def healthy(steps: int = 40, updates: int = 1, seed: int = 0) -> Records:
    """Metrics with the noise of small batches, of a run that learns."""
    draw, found = random.Random(seed), Records()
    for step in range(1, steps + 1):
        learnt = step / steps
        for _ in range(updates):
            noise = math.exp(draw.gauss(0.0, 0.5))
            found.append(
                {
                    "step": float(step),
                    "kl": 0.01 * noise,
                    "entropy": 0.3 * (1.1 - learnt) * noise**0.3,
                    "grad_norm": noise,
                    "clip_fraction": 0.05 * noise,
                    "reward_mean": 0.3 + 0.6 * learnt,
                    "reward_std": 0.4,
                    "groups_kept": 8.0,
                    "groups_dropped": 0.0,
                    "zero_variance_groups": float(draw.randint(2, 5)),
                    "episodes": 32.0,
                    "length_mean": 20.0 * noise**0.1,
                    "truncated_fraction": 0.02,
                    "value_loss": 0.1 * noise,
                    "loss": 1.0,
                }
            )
    return found


def flat(steps: int = 40) -> Records:
    """The same without a rise of the reward or a fall of the entropy."""
    return [record | {"reward_mean": 0.3, "entropy": 0.3} for record in healthy(steps)]


def from_step(begin: int, records: Records, **values: float) -> Records:
    """The records with other values from a step on."""
    return [record | values if record["step"] >= begin else record for record in records]


def names(records: Records) -> list[str]:
    return [alert.alert for alert in review(records)]


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_raises_nothing(updates: int, seed: int) -> None:
    assert names(healthy(updates=updates, seed=seed)) == []


FAULTS: dict[str, Records] = {
    "no_signal": from_step(1, flat(), zero_variance_groups=8.0, reward_std=0.0),
    "always_cut": from_step(1, healthy(), truncated_fraction=1.0),
    "no_gradient": from_step(1, flat(), grad_norm=0.0),
    "nan": from_step(20, healthy(), grad_norm=math.nan),
    "kl_explosion": from_step(20, healthy(), kl=0.5),
    "entropy_collapse": from_step(20, flat(), entropy=0.005),
    "entropy_rise": from_step(20, flat(), entropy=2.0),
    "gradient_spike": from_step(40, healthy(), grad_norm=80.0),
    "dead_groups": from_step(20, flat(), zero_variance_groups=8.0),
    "reward_variance_collapse": from_step(20, flat(), zero_variance_groups=8.0, reward_std=0.0),
    "clip_saturation": from_step(20, healthy(), clip_fraction=0.7),
    "value_divergence": from_step(20, healthy(), value_loss=50.0),
    "length_drift": from_step(20, healthy(), length_mean=60.0),
}


def test_the_page_of_a_run_knows_what_kept_it_from_learning() -> None:
    assert {name for name, rule in RULES.items() if rule.kind == "setup"} == CANNOT_LEARN


def test_every_alert_about_metrics_is_tried() -> None:
    assert {*FAULTS, "low_lr"} == {rule.name for rule in TRAINING}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_raises_its_own_alert_once(fault: str) -> None:
    alerts = review(FAULTS[fault])
    assert [alert.alert for alert in alerts] == [fault]
    assert alerts[0].cause and alerts[0].evidence and alerts[0].fix
    assert alerts[0].message == f"{alerts[0].evidence}. {alerts[0].fix}."


@pytest.mark.parametrize("fault", ["entropy_collapse", "reward_variance_collapse"])
def test_a_policy_that_has_learnt_its_task_is_not_ill(fault: str) -> None:
    assert names([one | {"reward_mean": min(1.0, 0.2 + place / 20)} for place, one in enumerate(FAULTS[fault])]) == []


def test_equal_groups_of_a_task_that_was_learnt_are_not_dead() -> None:
    groups = [min(8.0, 3.0 + place // 5) for place in range(40)]
    dying = [one | {"zero_variance_groups": dead} for one, dead in zip(flat(), groups, strict=True)]
    assert names(dying) == ["dead_groups"]
    rising = [one | {"reward_mean": min(1.0, 0.2 + place / 20)} for place, one in enumerate(dying)]
    assert names(rising) == ["dead_groups"], "prompts differ as much as answers did: half of them were given up"
    assert names([one | {"reward_std": 0.45 - place / 100} for place, one in enumerate(rising)]) == []


def test_a_critic_that_begins_before_the_first_reward_has_not_diverged() -> None:
    silent = from_step(1, healthy(), value_loss=0.0)[:10] + healthy()[10:]
    assert names(silent) == []
    assert names(from_step(20, silent, value_loss=50.0)) == ["value_divergence"]


def test_one_large_update_of_a_small_batch_is_no_explosion() -> None:
    records = healthy()
    records[0]["kl"] = records[10]["kl"] = 0.3
    assert names(records) == []
    records[20]["kl"] = 3.0
    (alert,) = review(records)
    assert alert.alert == "kl_explosion" and alert.step == 21 and "by 3 nats per token" in alert.evidence


def test_the_distance_to_a_reference_counts_only_with_a_reference() -> None:
    records = from_step(20, healthy(), kl_to_ref=5.0)
    assert names(records) == []
    assert names([record | {"kl_sequence": 1.0} for record in records]) == ["kl_explosion"]


def test_an_alert_is_repeated_only_after_it_has_cleared() -> None:
    records = healthy(60)
    for place in (20, 20 + CLEAR // 2, 45):
        records[place]["kl"] = 3.0
    assert [alert.step for alert in review(records)] == [21, 46]


def test_reward_noise_is_not_a_gain_that_hides_a_collapse() -> None:
    records = FAULTS["entropy_collapse"]
    assert names([record | {"reward_mean": 0.3 + 0.02 * (place % 2)} for place, record in enumerate(records)]) == [
        "entropy_collapse"
    ]


@pytest.mark.parametrize("cut", [5, 11, 30, 70])
def test_a_saved_watch_goes_on_with_the_same_alerts(cut: int) -> None:
    again = [record | {"step": record["step"] + 40} for record in from_step(35, healthy(), kl=0.5)]
    records = from_step(10, healthy(20), kl=0.5) + healthy(20) + again
    straight, one, other = Watch(), Watch(), Watch()
    whole = _fed(straight, records)
    assert len(whole) >= 2
    before = _fed(one, records[:cut])
    other.load_state_dict(one.state_dict())
    assert before + _fed(other, records[cut:]) == whole


def _fed(watch: Watch, records: Records) -> list[object]:
    return [alert for record in records for alert in watch.add(int(record["step"]), record)]


def test_rules_read_metrics_that_there_are() -> None:
    for rule in TRAINING:
        for name in rule.reads:
            assert lookup(name)


def test_the_run_raises_what_a_review_of_its_metrics_finds(tmp_path: Path) -> None:
    words = (*ON_TASK, "steps=6", "optim.lr=0.5", "entropy.coef=1", f"run_dir={tmp_path / 'run'}")
    finished("rl", *words)
    raised = [event for event in events(tmp_path / "run", "alert") if "alert" in event]
    assert [(event["alert"], event["step"]) for event in raised] == [
        (alert.alert, alert.step) for alert in review(metrics(tmp_path / "run"))
    ]
    assert "kl_explosion" in {event["alert"] for event in raised}
    for event in raised:
        rule = RULES[event["alert"]]
        assert event["cause"] == rule.cause and event["fix"] == rule.fix and event["severity"] == rule.severity
        assert event["message"].startswith(event["evidence"])


def test_a_resumed_run_raises_the_same_alerts_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    words = (*ON_TASK, "optim.lr=0.5", "entropy.coef=1", "save_every=1", "keep=9")
    finished("rl", *words, "steps=6", f"run_dir={tmp_path / 'whole'}")
    finished("rl", *words, "steps=3", f"run_dir={tmp_path / 'parts'}")
    finished("rl", *words, "steps=6", "resume=auto", f"run_dir={tmp_path / 'parts'}")

    def raised(run: Path) -> list[tuple[str, int, str]]:
        return [
            (event["alert"], event["step"], event["evidence"]) for event in events(run, "alert") if "alert" in event
        ]

    assert raised(tmp_path / "parts") == raised(tmp_path / "whole") != []
