"""The composition root. Only this package and `cli` read a configuration; all others receive plain values.

Importing this package is cheap: the parts of each command are loaded when it runs.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from novarl.config.base import TrainConfig
    from novarl.config.tree import EvalConfig, SampleConfig
    from novarl.run.lifecycle import Run


def configuration(kind: str, settings: Mapping[str, Any], where: str) -> TrainConfig:
    """The configuration of a training run from the keyword arguments of `where`, which may include objects."""
    from novarl.config.base import TrainConfig
    from novarl.config.objects import from_python
    from novarl.config.tree import TREES

    config = from_python(TREES[kind], settings, where)
    assert isinstance(config, TrainConfig)
    return config


def train(config: TrainConfig) -> Run:
    """A training run that has not started: RL, SFT, DPO or a reward model."""
    import importlib

    with _whole_imports():
        module = importlib.import_module(f"novarl.compose.{config.kind}")
    run: Run = getattr(module, f"{config.kind}_run")(config)
    return run


def run_training(config: TrainConfig) -> dict[str, Any]:
    """Train to the end; returns what summary.json holds. KeyboardInterrupt after Ctrl-C, once all is saved."""
    with closing(train(config)) as run:
        from novarl.run.report import check_end  # only now: `train` has imported everything, undisturbed by Ctrl-C

        return check_end(run.finish())


def run_eval(config: EvalConfig) -> dict[str, Any]:
    """Evaluate and return the contents of summary.json."""
    with _whole_imports():
        from novarl.compose.evaluate import run_eval as evaluate

    return evaluate(config)


def run_sample(config: SampleConfig) -> None:
    """Answer a prompt, or each line of the standard input."""
    with _whole_imports():
        from novarl.compose import sample

    sample.run_sample(config)


def check() -> None:
    """Print versions and device, and run one forward pass."""
    with _whole_imports():
        from novarl.compose.installation import run_check

    run_check()


@contextmanager
def _whole_imports() -> Iterator[None]:
    """Delay Ctrl-C until all imports are complete: torch would continue with a partial numpy and fail much later."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield  # signals do not reach this thread, or the caller has its own handler
        return
    stopped = False

    def note(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if stopped:
        raise KeyboardInterrupt
