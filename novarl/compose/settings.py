"""The settings of a run, from its configuration."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

from novarl.config.base import RunConfig
from novarl.config.keys import is_open
from novarl.config.load import to_dict, to_yaml
from novarl.core.errors import NovaError
from novarl.run.settings import RunSettings


def run_settings(config: RunConfig, *, threads: int | None, steps: int | None = None) -> RunSettings:
    """The settings of a training run, or of an evaluation, which has no checkpoints."""
    values = to_dict(config)
    known = values | values.get("log", {}) | {"threads": threads, "steps": steps}
    return RunSettings(
        values=values,
        text=to_yaml(config),
        named_by_user=partial(is_open, tree=type(config)),
        **{field.name: known[field.name] for field in fields(RunSettings) if field.name in known},
    )


def refuse_objects(config: RunConfig, why: str) -> None:
    """NovaError if the configuration contains Python objects."""
    for key in (
        "model",
        "rollout.env_path",
        "engine",
        *(f"reward.{name}" for name in getattr(config, "reward", None) or ()),
    ):
        if config.object(key) is not None:
            raise NovaError(f"{why} a Python object", where=key, fix="use a model name, or file.py:name")
