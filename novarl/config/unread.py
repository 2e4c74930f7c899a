"""Settings that have no effect."""

from __future__ import annotations

from novarl.config.base import TrainConfig
from novarl.config.parts import Node, Sampled
from novarl.config.tree import RLConfig


def without_effect(config: TrainConfig) -> list[str]:
    """A note for each section that has values but is not turned on, and for sampling settings of a greedy evaluation.
    A section that is turned off explicitly (`enabled: false`) may have any values."""
    off: list[tuple[str, Node, str]] = []
    if config.lora.rank == 0:
        off.append(("lora", config.lora, "lora.rank is 0"))
    if isinstance(config, RLConfig):
        for name in ("adaptive_kl", "constraint_optimization", "multi_objective", "dynamic_sampling"):
            section = getattr(config, name)
            if not section.enabled and "enabled" not in section.model_fields_set:
                off.append((name, section, f"{name}.enabled is not true"))
    notes = list(config.notes)
    for name, section, why in off:
        plain = type(section)()
        given = [key for key in type(section).model_fields if getattr(section, key) != getattr(plain, key)]
        if given:
            notes.append(f"No effect: {', '.join(f'{name}.{key}' for key in given)}, because {why}")
    if isinstance(config, RLConfig) and config.eval.k == 0:
        plain = type(config.eval)()
        if given := [key for key in Sampled.model_fields if getattr(config.eval, key) != getattr(plain, key)]:
            names = ", ".join(f"eval.{key}" for key in given)
            notes.append(f"No effect: {names}, because eval.k is 0 (evaluation is greedy)")
    return notes
