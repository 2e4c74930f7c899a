"""A reward of the user's own, from a Python file: `file.py:name`, sync or async.

    def reward_fn(messages, answer) -> float                       one rollout at a time: the conversation
    def reward_fn(completion, answer) -> float                     one rollout at a time: the policy's answer as text
    def reward_func(prompts, completions, **columns) -> list       TRL's: the whole batch; a column of the data per name

How it is called is decided by the names of its parameters, before training (`signature`). The file runs in a process of
its own with a time limit per call, so a reward that hangs, exits or crashes costs its own rollouts (for TRL's form: the
batch's) and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.types import Rollout
from novarl.rewards.in_process import InProcess
from novarl.rewards.loaded_file import Call, Function
from novarl.rewards.services import EXTRA, METRICS, VALUE, Progress, request
from novarl.rewards.signature import signature
from novarl.rewards.user_process import UserProcess
from novarl.rewards.verdict import Failure, Logged, Verdict, miscounted

TIME_LIMIT = 10.0
"""Seconds for one call."""
DEFAULT_NAME = "reward_fn"
Columns = Collection[str] | None


class FileReward:
    """One function of a user's file as a reward; what `load` returns."""

    def __init__(
        self, process: UserProcess | InProcess, function: Function, *, progress: Progress | None, columns: Columns
    ) -> None:
        self.signature = signature(function)
        if columns is not None:
            self.signature.check(columns)
        self.function = function
        self.time_limit = process.time_limit
        self._process = process
        self._progress = progress or Progress()

    @property
    def one_by_one(self) -> bool:
        """Whether each rollout is scored as soon as it has ended, while others are still sampled."""
        return self.signature.form == "row" and self._process.begins_early(self.function)

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        if self.signature.form == "row":
            calls = [self._with_services(self.signature.row(rollout), 1) for rollout in rollouts]
            return [_verdicts(said, 1)[0] for said in await self._process.call(self.function, calls)]
        call = self._with_services(self.signature.batch(rollouts), len(rollouts))
        (said,) = await self._process.call(self.function, [call])
        return _verdicts(said, len(rollouts), listed=True)

    @property
    def reads(self) -> Collection[str] | None:
        """The data's columns that the function may read; None for all of them."""
        return self.signature.reads

    def close(self) -> None:
        self._process.close()

    def _with_services(self, call: Call, count: int) -> Call:
        args, kwargs = call
        return args, kwargs | request(self.signature.services, self._progress, count=count)


def load(
    spec: str,
    *,
    time_limit: float = TIME_LIMIT,
    workers: int | None = 1,
    columns: Columns = None,
    progress: Progress | None = None,
    memory: int | None = None,
) -> FileReward:
    """The reward `file.py:name` (the name is `reward_fn` where none is given), its process started and its form known.

    time_limit:     seconds for one call: one rollout, or one batch in TRL's form
    workers:        processes among which the rollouts of a batch are divided (sync functions of one rollout); None: as
                    many as a slow function has use for
    columns:        the data's columns beside the prompt, where known: a function that needs one that is not there is
                    refused, with the nearest one
    progress:       what `trainer_state` says
    memory:         bytes that each process may have; None: no limit

    Errors: NovaError, one line with file and line, for a missing file or name, a file that does not import, or a
    function that does not take the policy's answer in any form.
    """
    path, name = split_spec(spec)
    process = UserProcess(path, time_limit=time_limit, workers=workers, memory=memory)
    try:
        return FileReward(process, process.function(name), progress=progress, columns=columns)
    except NovaError:
        process.close()
        raise


def from_function(
    function: Callable[..., Any],
    *,
    time_limit: float = TIME_LIMIT,
    columns: Columns = None,
    progress: Progress | None = None,
) -> FileReward:
    """The reward that a Python function is, in any of the forms above; it runs in this process. NovaError as `load`."""
    process = InProcess(function, time_limit=time_limit)
    return FileReward(process, process.describe(), progress=progress, columns=columns)


def split_spec(spec: str) -> tuple[Path, str]:
    """The file and the function of `file.py:name` or `file.py`. NovaError for anything else."""
    path, _, name = (spec, "", DEFAULT_NAME) if spec.endswith(".py") else spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        fix = "write it as file.py:function_name"
        raise NovaError(f"{spec!r} does not name a function in a Python file", where="reward", fix=fix)
    return Path(path), name


def _verdicts(said: Any, count: int, *, listed: bool = False) -> list[Verdict]:
    """What a call says of its `count` rollouts: a number, or a list of them if `listed`, and what it logged."""
    extra: dict[str, list[Any]] = {}
    metrics: dict[str, float] = {}
    if isinstance(said, dict) and set(said) == {VALUE, EXTRA, METRICS}:
        said, extra, metrics = said[VALUE], said[EXTRA], said[METRICS]
    if listed and not isinstance(said, Failure | list):
        said = Failure(f"returned {said!r:.80}, not a list of scores")
    if listed and isinstance(said, list) and len(said) != count:
        said = Failure(miscounted(len(said), count))
    verdicts: list[Any] = said if listed and isinstance(said, list) else [said] * count
    if not extra and not metrics:
        return verdicts
    columns = [{name: values[index] for name, values in extra.items()} for index in range(count)]
    return [Logged(verdict, column, metrics) for verdict, column in zip(verdicts, columns, strict=True)]
