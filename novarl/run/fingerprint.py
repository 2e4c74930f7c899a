"""A short hash of an architecture."""

from __future__ import annotations

import hashlib

from novarl.models.load import Policy
from novarl.models.lora import plain_parameters


def fingerprint(policy: Policy) -> str:
    """Equal for two models whose weights have the same names and shapes."""
    shapes = ";".join(f"{name}:{tuple(value.shape)}" for name, value in plain_parameters(policy.model))
    return hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()
