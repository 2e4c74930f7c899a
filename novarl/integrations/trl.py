"""TRL 1.16: a callback that writes a run directory while GRPO, RLOO, SFT, DPO or reward training runs.

    from novarl.integrations.trl import NovaCallback
    trainer.add_callback(NovaCallback("runs/x"))

A mistake of the callback never stops training: it is reported once on stderr, and nothing more is written.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

from novarl.core.errors import NovaError, visible
from novarl.integrations.lines import StepLines
from novarl.integrations.names import TRL, TRL_HELD_OUT, plain_settings, translate
from novarl.integrations.trl_logs import divided
from novarl.integrations.trl_rollouts import RolloutRecorder
from novarl.observe.sinks.jsonl import read_lines
from novarl.observe.writer import RunWriter

KINDS = {
    "GRPOConfig": ("grpo", "rl"),
    "RLOOConfig": ("rloo", "rl"),
    "SFTConfig": ("sft", "sft"),
    "DPOConfig": ("dpo", "dpo"),
    "KTOConfig": ("kto", "dpo"),
    "RewardConfig": ("reward", "rm"),
}
"""The class of the arguments: the `kinds` of `names.TRL`, and the kind of the run."""

SPARSE = 10
"""Above the size limit, the answers of one in this many steps are recorded."""


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """An event of the callback that never raises, and does nothing after the first failure."""

    @functools.wraps(method)
    def event(self: NovaCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.failure is None and getattr(state, "is_world_process_zero", True):
            try:
                method(self, args, state, **kwargs)
            except Exception as error:  # noqa: BLE001 - the user's training goes on, whatever it is
                self.fail(error)

    return event


class NovaCallback:
    """A `transformers.TrainerCallback` (by its methods, not its class) that writes the run directory `run`.

    If the directory already holds a run, `run-2`, `run-3`, ... is written instead; a training that is resumed from a
    checkpoint continues its own. `trainer` is only needed where the callback cannot find it, which is reported. The
    answers of every `rollouts_every`-th step are recorded (None: of none), and once they exceed `rollouts_gb`
    gigabytes, of one in ten of these.

    failure   the error after which nothing more was written, or None
    path      the directory that is written, once training has begun

    Raises NovaError if `rollouts_every` is below 1.
    """

    def __init__(
        self, run: str | Path, trainer: Any = None, *, rollouts_every: int | None = 1, rollouts_gb: float = 2.0
    ) -> None:
        if rollouts_every is not None and rollouts_every < 1:
            raise NovaError(f"rollouts_every is {rollouts_every}", where="NovaCallback", fix="use 1 or more, or None")
        self.path = Path(run).expanduser()
        self.rollouts_every, self.rollouts_gb = rollouts_every, rollouts_gb
        self.failure: Exception | None = None
        self._trainer = trainer
        self._writer: RunWriter | None = None
        self._lines: StepLines | None = None
        self._recorder: RolloutRecorder | None = None
        self._kind = ""
        self._settings: dict[str, Any] = {}
        self._totals: dict[str, Any] = {}
        self._sizes: dict[int, int] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):  # transformers calls every event of every callback
            return _ignore
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @guarded
    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        trainer = self._trainer or _calling_trainer(self)
        self._kind, kind = _kinds(args)
        self._settings, self._totals = args.to_dict(), {}
        done = int(state.global_step)
        self.path, extend = _directory(self.path, done)
        writer = RunWriter(
            self.path,
            writer=f"trl {_version('trl')}",
            kind=kind,
            steps=state.max_steps,
            config={"trainer": type(trainer).__name__ if trainer else self._kind, **plain_settings(self._settings)},
            manifest=_manifest(args, kwargs.get("model")),
            extend=extend,
        )
        self._writer, self._lines = writer, StepLines(writer)
        if trainer is not None and hasattr(trainer, "_generate_and_score_completions"):
            size = int(self._settings.get("num_generations") or 1)
            self._recorder = RolloutRecorder(trainer, size, self._wants, self.fail)
        elif self._kind in ("grpo", "rloo"):
            _say("the trainer was not found, so answers are not recorded (use attach(trainer, run))")
            writer.event("alert", message="answers are not recorded: the trainer was not found")

    @guarded
    def on_step_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        if self._lines is not None:
            self._lines.flush()
        if self._recorder is not None:
            self._recorder.begin(int(state.global_step) + 1)

    @guarded
    def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        if self._recorder is not None and self._writer is not None:
            for step, rows in self._recorder.take():
                self._writer.rollouts(step, rows)
                self._sizes[step] = (self.path / "rollouts" / f"step-{step:06d}.jsonl").stat().st_size

    @guarded
    def on_log(self, args: Any, state: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if self._lines is None or not logs:
            return
        step, log = int(state.global_step), divided(logs)
        self._totals |= log.totals
        if log.held_out:
            self._lines.evaluation(step, translate(log.held_out, TRL_HELD_OUT, "trl").metrics)
        if log.training:
            found = translate(log.training, TRL, "trl", self._kind, self._settings)
            counts = self._recorder.counts() if self._recorder is not None else {}
            self._lines.add(step, counts | found.metrics, found.refused)

    @guarded
    def on_save(self, args: Any, state: Any, **kwargs: Any) -> None:
        if self._writer is not None:
            step = int(state.global_step)
            self._writer.event("save", step=step, name=os.path.join(args.output_dir, f"checkpoint-{step}"))

    @guarded
    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        if self._writer is None or self._lines is None:
            return
        self._lines.flush()
        entries: dict[str, Any] = {"steps": int(state.global_step), "writer": f"trl {_version('trl')}"}
        if "train_runtime" in self._totals:
            entries["seconds"] = self._totals["train_runtime"]
        done = state.global_step >= state.max_steps
        self._writer.close("done" if done else "stopped", **entries, trl=dict(self._totals))
        self._release()

    def fail(self, error: Exception) -> None:
        """Report `error` once, and write nothing more."""
        if self.failure is None:
            self.failure = error
            what = str(error) or type(error).__name__
            _say(f"{type(error).__name__}: {what}; training goes on, and nothing more is written to {self.path}")
            self._release()

    def _wants(self, step: int) -> bool:
        """Whether the answers of `step` are recorded."""
        if self.rollouts_every is None:
            return False
        sparse = SPARSE if sum(self._sizes.values()) > self.rollouts_gb * 1e9 else 1
        return step == 1 or step % (self.rollouts_every * sparse) == 0

    def _release(self) -> None:
        if self._recorder is not None:
            self._recorder.release()
        self._writer = self._lines = self._recorder = None


def attach(trainer: Any, run: str | Path) -> NovaCallback:
    """Add a NovaCallback that writes `run` to a TRL trainer, and return it."""
    callback = NovaCallback(run, trainer)
    trainer.add_callback(callback)
    return callback


def _ignore(*args: Any, **kwargs: Any) -> None:
    """An event that is not needed."""


def _say(message: str) -> None:
    print(visible(f"novarl: {message}"), file=sys.stderr, flush=True)


def _calling_trainer(callback: NovaCallback) -> Any:
    """The trainer whose training calls `callback`: transformers passes everything to callbacks but the trainer, whose
    methods are on the stack. None if it is not there."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "callback_handler", None)
        if handler is not None and any(one is callback for one in getattr(handler, "callbacks", ())):
            return owner
        frame = frame.f_back
    return None


def _kinds(args: Any) -> tuple[str, str]:
    """The trainer's kind in `names.TRL` and the run's, by the class of its arguments."""
    for base in type(args).__mro__:
        if base.__name__ in KINDS:
            return KINDS[base.__name__]
    return type(args).__name__, "rl" if hasattr(args, "num_generations") else "sft"


def _directory(path: Path, done: int) -> tuple[Path, bool]:
    """Where to write, and whether a run there is continued: one that has been resumed after `done` steps."""
    if not (path / "metrics.jsonl").exists():
        return path, False
    if done > 0:
        _cut(path, done)
        return path, True
    number = next(n for n in range(2, 1_000_000) if not (path.with_name(f"{path.name}-{n}") / "metrics.jsonl").exists())
    free = path.with_name(f"{path.name}-{number}")
    _say(f"{path} already holds a run; this one is written to {free}")
    return free, False


def _cut(path: Path, done: int) -> None:
    """Remove what was recorded after step `done`, which is trained again."""
    for file in (path / "metrics.jsonl", path / "events.jsonl", path / "logs" / "train.jsonl"):
        if file.exists():
            kept = [
                json.dumps(one, ensure_ascii=False) + "\n" for one in read_lines(file) if one.get("step", 0) <= done
            ]
            file.with_suffix(".part").write_text("".join(kept), encoding="utf-8", errors="backslashreplace")
            os.replace(file.with_suffix(".part"), file)
    for rollouts in (path / "rollouts").glob("step-*.jsonl"):
        if int(rollouts.stem.removeprefix("step-")) > done:
            rollouts.unlink()
    (path / "summary.json").unlink(missing_ok=True)


def _manifest(args: Any, model: Any) -> dict[str, Any]:
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in ("trl", "transformers", "accelerate", "torch")},
        "seed": args.seed,
        "device": str(args.device),
        "processes": args.world_size,
        "model": str(name) if name else None,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
