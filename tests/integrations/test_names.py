"""The tables of other libraries' metric names."""

from __future__ import annotations

import math

import pytest

from novarl.integrations.names import OPENRLHF, TRL, plain_settings, translate
from novarl.observe.glossary import lookup


@pytest.mark.parametrize("row", [row for table in (TRL, OPENRLHF) for row in table], ids=lambda row: row.theirs)
def test_every_row_leads_to_a_metric_or_a_time(row) -> None:  # type: ignore[no-untyped-def]
    ours = row.ours.replace(r"\1", "x")
    assert ours.startswith("time/") or lookup(ours)


def test_names_keep_their_meaning() -> None:
    logs = {"kl": 0.1, "reward": 1.0, "rewards/f/mean": 0.5, "rewards/f/std": 0.2, "epoch": 0.3, "custom": 2}
    found = translate(logs, TRL, "trl", "grpo", {"num_iterations": 1})
    assert found.metrics == {
        "kl_mean": 0.1,
        "reward_mean": 1.0,
        "rewards/f_mean": 0.5,
        "rewards/f/std": 0.2,
        "trl/epoch": 0.3,
        "custom": 2.0,
    }
    assert found.renamed["kl"] == "kl_mean" and "custom" not in found.renamed


@pytest.mark.parametrize(
    ("kind", "settings", "name", "ours"),
    [
        ("grpo", {"num_iterations": 2}, "kl", "trl/kl"),
        ("grpo", {"num_iterations": 2, "use_bias_correction_kl": False}, "kl", "kl_mean"),
        ("grpo", {"steps_per_generation": 4, "gradient_accumulation_steps": 2}, "kl", "trl/kl"),
        ("rloo", {}, "kl", "rollout_kl_mean"),
        ("online", {}, "kl", "trl/kl"),
        ("grpo", {"importance_sampling_level": "sequence"}, "clip_ratio/region_mean", "clip_ratio/region_mean"),
        ("rloo", {}, "clip_ratio/region_mean", "clip_ratio/region_mean"),
        ("sft", {"loss_type": "dft"}, "loss", "trl/loss"),
        ("sft", {"loss_type": "nll"}, "loss", "loss"),
        ("grpo", {}, "loss", "total_loss"),
        ("reward", {}, "accuracy", "preference_accuracy"),
        ("dpo", {}, "entropy", "trl/entropy"),
        ("KTOTrainer", {}, "loss", "trl/loss"),
    ],
)
def test_a_name_is_only_ours_where_the_meaning_is(kind: str, settings: dict[str, object], name: str, ours: str) -> None:
    assert translate({name: 0.5}, TRL, "trl", kind, settings).metrics == {ours: 0.5}


def test_absent_and_odd_values() -> None:
    found = translate({"kl": None, "reward": math.nan, "note": "text", "flag": True}, TRL, "trl", "grpo")
    assert math.isnan(found.metrics.pop("reward_mean")) and found.metrics == {"flag": 1.0}
    assert found.refused == ["note"]


def test_of_two_names_for_one_metric_the_first_row_wins() -> None:
    found = translate({"reward": 1.0, "rollout/reward_mean": 2.0, "kl": 0.1}, OPENRLHF, "openrlhf")
    assert found.metrics == {"reward_mean": 2.0, "reward": 1.0, "openrlhf/kl": 0.1}
    assert translate({"reward": 1.0}, OPENRLHF, "openrlhf").metrics == {"reward_mean": 1.0}


def test_secrets_are_left_out() -> None:
    settings = {
        "hub_token": "a",
        "push_to_hub_token": "b",
        "eos_token": "<end>",
        "max_tokens": 5,
        "wandb": {"key": "c", "project": "p"},
        "OPENAI_API_KEY": "d",
        "path": __import__("pathlib").Path("x"),
    }
    wanted = {"eos_token": "<end>", "max_tokens": 5, "wandb": {"project": "p"}, "path": "x"}
    assert plain_settings(settings) == wanted
