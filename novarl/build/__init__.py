"""The composition root: with `cli` the only reader of a configuration. Everything below takes the few values it needs.

Importing this package costs nothing: each command's parts are loaded when it runs.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from novarl.core.errors import NovaError

if TYPE_CHECKING:
    from novarl.config.preference import DPOConfig, RMConfig
    from novarl.config.tree import EvalConfig, RLConfig, SampleConfig, SFTConfig

C = TypeVar("C")


def run_rl(config: RLConfig) -> dict[str, Any]:
    """Reinforcement learning; returns what summary.json holds. KeyboardInterrupt after Ctrl-C, once all is saved."""
    with _whole_imports():
        from novarl.build import rl

    return _unless_stopped(_alone(rl.run_rl, config))


def run_sft(config: SFTConfig) -> dict[str, Any]:
    """Supervised fine-tuning; as `run_rl`."""
    with _whole_imports():
        from novarl.build import sft

    return _unless_stopped(_alone(sft.run_sft, config))


def run_dpo(config: DPOConfig) -> dict[str, Any]:
    """Direct preference optimisation; as `run_rl`."""
    with _whole_imports():
        from novarl.build import dpo

    return _unless_stopped(_alone(dpo.run_dpo, config))


def run_rm(config: RMConfig) -> dict[str, Any]:
    """A reward model; as `run_rl`."""
    with _whole_imports():
        from novarl.build import rm

    return _unless_stopped(_alone(rm.run_rm, config))


def run_eval(config: EvalConfig) -> dict[str, Any]:
    """Evaluation; returns what summary.json holds."""
    with _whole_imports():
        from novarl.build import evaluate

    return _alone(evaluate.run_eval, config)


def run_sample(config: SampleConfig) -> None:
    """Answer a prompt, or every line of the standard input."""
    with _whole_imports():
        from novarl.build import talk

    talk.run_sample(config)


def check() -> None:
    """Print versions and device, and run one forward pass."""
    with _whole_imports():
        from novarl.build import selfcheck

    selfcheck.run_check()


def _alone(run: Callable[[C], dict[str, Any]], config: C) -> dict[str, Any]:
    """No other process writes to the directory of the run meanwhile."""
    from novarl.core.rundir import let_go

    try:
        return run(config)
    finally:
        let_go()


@contextmanager
def _whole_imports() -> Iterator[None]:
    """Ctrl-C waits until everything is imported: torch would go on with half of numpy, which fails much later."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield  # no signal reaches this thread, or somebody else has decided what one means
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


def _unless_stopped(summary: dict[str, Any]) -> dict[str, Any]:
    if summary["status"] == "unsaved":
        raise NovaError(
            f"the checkpoint of step {summary['steps']} could not be written, so what was learnt last is not kept",
            where=summary.get("paths", {}).get("run_dir"),
            fix="make room, then go on from the last checkpoint with resume=auto",
        )
    if summary["status"] == "stopped":
        raise KeyboardInterrupt(f"stopped after {summary['stopped_after']}, and saved")
    return summary
