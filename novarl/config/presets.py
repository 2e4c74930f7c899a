"""Built-in configurations of commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEMO: Mapping[str, Any] = {
    "task": "sort",
    "model": "tiny",
    "algo": "dr_grpo",
    "steps": 24,
    "kl": {"type": "loss", "coef": 0.2},
    "log": {"samples_every": 6},
}
"""`novarl demo`: a byte-level model learns to sort in under two minutes. configs/sort.yaml explains the settings."""
