"""Every metric has a complete entry, patterns match what they should and no more, a wrong name names its nearest."""

from __future__ import annotations

from pathlib import Path

import pytest

from novarl.observe.glossary import METRICS, Metric, deterministic, lookup
from novarl.observe.glossary_page import page

PROMISED = (
    "total_loss policy_loss kl_loss reward_mean reward_std kl_mean kl_std clip_fraction "
    "policy_objective kl kl_to_ref kl_penalty kl_coef episodes_per_second"
)


@pytest.mark.parametrize("name", PROMISED.split(" "))
def test_the_promised_names_have_an_entry(name: str) -> None:
    assert isinstance(lookup(name), Metric)


@pytest.mark.parametrize("name", METRICS)
def test_every_entry_is_complete(name: str) -> None:
    metric = METRICS[name]
    assert metric.formula
    assert metric.unit
    assert metric.direction in ("up", "down", "watch")


def test_the_clock_and_the_machine_are_not_deterministic_and_all_else_is() -> None:
    assert {name for name, metric in METRICS.items() if not metric.deterministic} == {
        "time/<name>_s",
        "episodes_per_second",
        "tokens_per_second",
        "micro_batches",
        "split_micro_batches",
        "memory_rss_mb",
        "memory_device_mb",
    }
    assert not deterministic("time/rollout_s")
    assert deterministic("reward_mean")
    assert deterministic("a name that nobody has written down")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("rewards/length_mean", "rewards/<name>_mean"),
        ("rewards/a b-c_mean", "rewards/<name>_mean"),
        ("time/rollout_s", "time/<name>_s"),
        ("eval/pass_at_8", "eval/pass_at_<k>"),
    ],
)
def test_patterns(name: str, entry: str) -> None:
    assert lookup(name) is METRICS[entry]


@pytest.mark.parametrize(
    "name", ["rewards/a/b_mean", "eval/pass_at_x", "time/_s", "rewards/<name>_mean ", "", "Reward_mean"]
)
def test_names_that_only_look_right_are_refused(name: str) -> None:
    with pytest.raises(KeyError):
        lookup(name)


def test_a_misspelt_name_names_the_nearest() -> None:
    with pytest.raises(KeyError, match=r"no metric 'reward_meen'.*did you mean 'reward_mean'"):
        lookup("reward_meen")


def test_the_page_is_that_of_the_glossary_and_has_every_entry() -> None:
    written = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert written == page(), "python -m novarl.observe.glossary_page > docs/metrics.md"
    assert [name for name in METRICS if f"| `{name}`" not in written] == []
