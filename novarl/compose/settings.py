"""The settings of a run, from its configuration."""

from __future__ import annotations

from functools import partial

from novarl.config.base import RunConfig, TrainConfig
from novarl.config.keys import is_open
from novarl.config.load import to_dict, to_yaml
from novarl.config.parts import Log
from novarl.core.errors import NovaError
from novarl.observe.trackers.registry import Tracking, check
from novarl.run.settings import RunSettings


def run_settings(config: RunConfig, *, threads: int | None, steps: int | None = None) -> RunSettings:
    """The settings of a training run, or of an evaluation, which has no checkpoints."""
    training = config if isinstance(config, TrainConfig) else None
    log = getattr(config, "log", None)
    return RunSettings(
        kind=config.kind,
        model=config.model,
        seed=config.seed,
        device=config.device,
        threads=threads,
        run_dir=config.run_dir,
        resume=training.resume if training else None,
        steps=steps,
        save_every=training.save_every if training else None,
        eval_every=training.eval_every if training else None,
        keep=training.keep if training else 1,
        keep_best=training is not None and training.keep_best,
        console=log is not None and log.console,
        tensorboard=log is not None and log.tensorboard,
        tracking=_tracking(config, log),
        values=to_dict(config),
        text=to_yaml(config),
        named_by_user=partial(is_open, tree=type(config)),
        from_python=config.has_objects,
    )


def _tracking(config: RunConfig, log: Log | None) -> Tracking:
    """The trackers of the run. NovaError if the library of one is not installed."""
    if log is None:
        return Tracking()
    check(log.trackers)
    return Tracking(tuple(log.trackers), log.project, log.run_name, log.artifacts, to_dict(config))


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
