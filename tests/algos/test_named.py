"""The table of algorithms says what the papers say, stays frozen, and loads without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from novarl.algos.named import ALGORITHMS

FIVE_AXES = {
    # name: estimator, std, surrogate, clips, KL, aggregation, constant
    "reinforce": ("none", False, "reinforce", None, None, "constant", "one"),
    "rloo": ("leave_one_out", False, "reinforce", None, None, "constant", "one"),
    "grpo": ("group", True, "ppo_clip", (0.2, 0.2), ("loss", "k3", 0.04), "sequence", None),
    "dr_grpo": ("group", False, "ppo_clip", (0.2, 0.2), None, "constant", "max_tokens"),
    "dapo": ("group", True, "ppo_clip", (0.2, 0.28), None, "token", None),
    "ppo_clip": ("group", False, "ppo_clip", (0.2, 0.2), None, "token", None),
    "gspo": ("group", True, "gspo", (3e-4, 4e-4), None, "sequence", None),
    "cispo": ("group", True, "cispo", (1.0, 4.0), None, "token", None),
    "reinforce_pp": ("reinforce_pp", False, "ppo_clip", (0.2, 0.2), ("loss", "k2", 0.01), "token", None),
    "remax": ("scst", False, "reinforce", None, None, "constant", "one"),
    "opo": ("opo", False, "reinforce", None, None, "constant", "one"),
    "ppo": ("gae", False, "ppo_clip", (0.2, 0.2), ("reward", "k1", 0.01), "token", None),
    "vineppo": ("gae", False, "ppo_clip", (0.2, 0.2), None, "token", None),
    "prime": ("prime", False, "ppo_clip", (0.2, 0.2), None, "token", None),
}
OVER_TIME = {
    # name: whiten, gamma, lambda, values
    "ppo": (True, 1.0, 0.95, "critic"),
    "vineppo": (True, 1.0, 0.0, "continuations"),
    "prime": (False, 1.0, None, None),
}
UPDATES = {"dapo": 4, "ppo_clip": 4, "gspo": 4, "cispo": 4, "reinforce_pp": 2, "ppo": 4, "vineppo": 4, "prime": 2}
"""Updates per rollout, where there are several."""


@pytest.mark.parametrize("name", FIVE_AXES)
def test_row(name: str) -> None:
    row = ALGORITHMS[name]
    options = row.options
    found = (
        row.estimator,
        options.get("adv.norm_std", False),
        row.surrogate,
        (options["clip.low"], options["clip.high"]) if "clip.low" in options else None,
        (row.kl_type, row.kl_estimator, row.kl_coef) if row.kl_type else None,
        row.aggregation,
        row.constant if row.aggregation == "constant" else None,
    )
    assert found == FIVE_AXES[name]
    over_time = row.whiten, options.get("adv.gamma"), options.get("adv.lam"), row.values
    assert over_time == OVER_TIME.get(name, (False, None, None, None))
    assert row.updates_per_rollout == UPDATES.get(name, 1)
    assert row.entropy_coef == 0.0
    assert row.name == name
    assert row.paper.startswith("https://") and row.summary.endswith(".")


def test_the_table_is_whole() -> None:
    assert list(ALGORITHMS) == list(FIVE_AXES)
    assert [row.name for row in ALGORITHMS.values() if row.dynamic_sampling] == ["dapo"]


def test_nobody_can_change_a_row() -> None:
    with pytest.raises(TypeError):
        ALGORITHMS["mine"] = ALGORITHMS["rloo"]  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        ALGORITHMS["rloo"].kl_coef = 1.0  # type: ignore[misc]


def test_needs_follow_the_axes() -> None:
    assert {name: set(row.needs) for name, row in ALGORITHMS.items()} == {
        "reinforce": set(),
        "rloo": {"group"},
        "grpo": {"group", "reference"},
        "dr_grpo": {"group"},
        "dapo": {"group", "old_logp"},
        "ppo_clip": {"group", "old_logp"},
        "gspo": {"group", "old_logp"},
        "cispo": {"group", "old_logp"},
        "reinforce_pp": {"group", "reference", "old_logp"},
        "remax": {"greedy"},
        "opo": {"group"},
        "ppo": {"values", "reference", "old_logp"},
        "vineppo": {"values", "old_logp"},
        "prime": {"group", "process", "reference", "old_logp"},
    }
    plain = ALGORITHMS["reinforce"]
    assert replace(plain, estimator="file.py:mine", surrogate="file.py:mine").needs == set()
    assert replace(plain, estimator="scst").needs == {"greedy"}
    assert replace(plain, kl_type="reward", kl_coef=0.1).needs == {"reference", "old_logp"}
    assert replace(plain, kl_type="reward", kl_coef=0.0).needs == set()
    assert replace(plain, kl_type="loss", kl_coef=0.1).needs == {"reference"}
    assert replace(plain, estimator="vtrace", values="critic").needs == {"values", "old_logp"}
    assert replace(plain, updates_per_rollout=2).needs == {"old_logp"}
    assert replace(ALGORITHMS["ppo"], kl_coef=0.0, updates_per_rollout=1).needs == {"values"}


def test_the_table_loads_without_torch() -> None:
    code = "import sys, novarl.algos.named; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
