"""OpenRLHF 0.11: a logger that writes a run directory while PPO (or GRPO, RLOO, REINFORCE++) runs.

OpenRLHF's trainer has two places for loggers, `wandb_logger` and `tensorboard_logger`. Any object with `log_train`,
`log_eval` and `close` serves in either:

    from novarl.integrations.openrlhf import NovaLogger
    self.tensorboard_logger = NovaLogger("runs/x", self.args)

A mistake of the logger never stops training: it is reported once on stderr, and nothing more is written.
"""

from __future__ import annotations

import functools
import importlib
import platform
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError, visible
from novarl.integrations.lines import StepLines
from novarl.integrations.names import OPENRLHF, plain_settings, translate
from novarl.observe.writer import RunWriter

SAMPLES = "generated_samples"
"""The one entry of a log that is no number: the text of an answer with its prompt, and its reward."""


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """A method of the logger that never raises, and does nothing after the first failure."""

    @functools.wraps(method)
    def call(self: NovaLogger, *args: Any, **kwargs: Any) -> None:
        if self.failure is None:
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the user's training goes on, whatever it is
                self.failure = error
                what = f"novarl: {type(error).__name__}: {error}; training goes on, and nothing more is written to "
                print(visible(f"{what}{self.path}"), file=sys.stderr, flush=True)

    return call


class NovaLogger:
    """Writes the run directory `run`. `settings` are the arguments of OpenRLHF (a namespace or a mapping), without
    secrets in config.yaml; `extend` continues a run that was resumed.

    failure   the error after which nothing more was written, or None

    Raises NovaError if the directory already holds a run, unless `extend` is True.
    """

    def __init__(self, run: str | Path, settings: Any = None, *, extend: bool = False) -> None:
        self.path = Path(run).expanduser()
        self.failure: Exception | None = None
        self._written = False
        version = _version("openrlhf")
        self._writer = RunWriter(
            self.path,
            writer=f"openrlhf {version}" if version else "openrlhf",
            kind="rl",
            config=None if settings is None else plain_settings(_nested(settings)),
            manifest={
                "python": platform.python_version(),
                "packages": {name: _version(name) for name in ("openrlhf", "torch", "transformers", "vllm", "ray")},
            },
            extend=extend,
        )
        self._lines = StepLines(self._writer)

    @guarded
    def log_train(self, global_step: int, logs_dict: Mapping[str, Any]) -> None:
        """Record the metrics of a step, and the sample among them."""
        logs = dict(logs_dict)
        sample = logs.pop(SAMPLES, None)
        found = translate(logs, OPENRLHF, "openrlhf")
        self._lines.add(int(global_step), found.metrics, found.refused)
        if sample:
            text, reward = sample
            self._writer.event("sample", step=int(global_step), prompt=None, text=str(text), reward=float(reward))

    @guarded
    def log_eval(self, global_step: int, logs_dict: Mapping[str, Any]) -> None:
        """Record an evaluation."""
        self._lines.evaluation(int(global_step), translate(logs_dict, (), "openrlhf").metrics)

    @guarded
    def close(self) -> None:
        """Write summary.json. Further calls do nothing."""
        if not self._written:
            self._written = True
            self._lines.flush()
            self._writer.close("done", writer="openrlhf")


def _nested(settings: Any) -> Mapping[str, Any]:
    """A namespace, whose values may be namespaces, as mappings."""
    if not isinstance(settings, Mapping):
        settings = vars(settings)
    return {name: _nested(value) if hasattr(value, "__dict__") else value for name, value in settings.items()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def replace_logger(run: str | Path, module: Any = None) -> None:
    """Make OpenRLHF's trainers log to `run` instead of TensorBoard, without a change of its code: for the setup hook of
    Ray's worker processes. `--logger.tensorboard_dir` must be given, because otherwise OpenRLHF makes no logger.

    Raises NovaError if openrlhf is not installed.
    """
    if module is None:
        try:
            module = importlib.import_module("openrlhf.trainer.ppo_trainer")
        except ImportError as error:
            what = "openrlhf cannot be imported"
            raise NovaError(f"{what} ({error})", where="replace_logger", fix="pip install openrlhf") from error
    module.TensorboardLogger = lambda args: NovaLogger(run, args)
