"""A reward of the user's own, from a Python file: `file.py:name`, sync or async, in one of two forms.

    def reward_fn(messages, answer) -> float                       one rollout at a time
    def reward_func(prompts, completions, **columns) -> list       TRL's: the whole batch; a column of the data per name

The form is recognised by the signature, before training: a function with a parameter `completions` (or with nothing but
`**columns`) is TRL's, one that takes two positional arguments is the other. `messages` is the whole conversation with
the policy's last answer at its end, as RL2 passes it; `prompts` and `completions` are lists of messages, or strings
where the data's prompts are, and `completion_ids` are the tokens that were sampled. The file runs in a process of its
own with a time limit per call, so a reward that hangs, exits or crashes costs its own rollouts (for TRL's form: the
batch's) and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from novarl.core.errors import NovaError
from novarl.core.types import Rollout
from novarl.rewards.lane import Function
from novarl.rewards.process import UserProcess
from novarl.rewards.verdict import Failure, Verdict

TIME_LIMIT = 10.0
"""Seconds for one call."""
DEFAULT_NAME = "reward_fn"
_FIX = "write reward_fn(messages, answer), or TRL's reward_func(prompts, completions, **columns)"


class FileReward:
    """One function of a user's file as a reward; what `load` returns."""

    def __init__(self, process: UserProcess, function: Function) -> None:
        self.form = form(function)
        self.function = function
        self.time_limit = process.time_limit
        self._process = process

    @property
    def one_by_one(self) -> bool:
        """Whether rollouts are judged while others are still sampled: by a function that takes one at a time, and long
        enough, as is known of one that has answered before. One that never has may hang on all of them, which a whole
        batch finds out in one limit."""
        return self.form == "row" and self._process.hurries(self.function)

    @property
    def room(self) -> int:
        """How many more rollouts could be judged at once, beside those that are."""
        return self._process.room(self.function)

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        if self.form == "row":
            return await self._process.call(self.function, [(_row(rollout), {}) for rollout in rollouts])
        arguments = self._columns(rollouts)
        (scores,) = await self._process.call(self.function, [((), arguments)])
        if not isinstance(scores, Failure) and not isinstance(scores, list):
            scores = Failure(f"returned {scores!r:.80}, not a list of scores")
        if isinstance(scores, list) and len(scores) != len(rollouts):
            scores = Failure(f"returned {len(scores)} scores for {len(rollouts)} rollouts")
        return [scores] * len(rollouts) if isinstance(scores, Failure) else scores

    def close(self) -> None:
        self._process.close()

    def _columns(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """TRL's arguments, those that the function takes: a list over the batch by name."""
        names = {name for rollout in rollouts for name in rollout.prompt.extra}
        columns: dict[str, Any] = {
            name: [rollout.prompt.extra.get(name) for rollout in rollouts] for name in sorted(names)
        }
        columns["answer"] = [rollout.prompt.answer for rollout in rollouts]
        columns["prompts"] = [_asked(rollout) for rollout in rollouts]
        columns["completions"] = [_answered(rollout) for rollout in rollouts]
        columns["completion_ids"] = [_sampled(rollout) for rollout in rollouts]
        takes = {name for name, _, _ in self.function.parameters}
        takes_all = any(kind == "VAR_KEYWORD" for _, kind, _ in self.function.parameters)
        return {name: column for name, column in columns.items() if takes_all or name in takes}


def load(
    spec: str,
    *,
    time_limit: float = TIME_LIMIT,
    workers: int | None = 1,
    columns: Collection[str] | None = None,
    memory: int | None = None,
) -> FileReward:
    """The reward `file.py:name` (the name is `reward_fn` where none is given), its process started and its form known.

    time_limit:     seconds for one call: one rollout, or one batch in TRL's form
    workers:        processes among which the rollouts of a batch are divided (sync functions of one rollout); None: as
                    many as a slow function has use for
    columns:        the data's columns beside the prompt, where known: a TRL function that needs one that is not there
                    is refused
    memory:         bytes that each process may have; None: no limit

    Errors: NovaError, one line with file and line, for a missing file or name, a file that does not import, or a
    function of neither form.
    """
    path, name = split_spec(spec)
    process = UserProcess(path, time_limit=time_limit, workers=workers, memory=memory)
    try:
        function = process.function(name)
        if form(function) == "batch" and columns is not None:
            _check_columns(function, columns)
        return FileReward(process, function)
    except NovaError:
        process.close()
        raise


def split_spec(spec: str) -> tuple[Path, str]:
    """The file and the function of `file.py:name` or `file.py`. NovaError for anything else."""
    path, _, name = (spec, "", DEFAULT_NAME) if spec.endswith(".py") else spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        fix = "write it as file.py:function_name"
        raise NovaError(f"{spec!r} does not name a function in a Python file", where="reward", fix=fix)
    return Path(path), name


def form(function: Function) -> Literal["row", "batch"]:
    """Which of the two forms a function has, by its parameters. NovaError where it is neither."""
    names = {name for name, _, _ in function.parameters}
    kinds = [kind for _, kind, _ in function.parameters]
    positional = [p for p in function.parameters if p[1] in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")]
    needed = [p for p in positional if not p[2]]
    lacking = [name for name, kind, default in function.parameters if kind == "KEYWORD_ONLY" and not default]
    if "completions" in names or (kinds == ["VAR_KEYWORD"]):
        return "batch"
    two = len(needed) <= 2 and (len(positional) >= 2 or "VAR_POSITIONAL" in kinds)
    if two and not lacking and "prompts" not in names:
        return "row"
    shown = ", ".join(name for name, _, _ in function.parameters)
    fix = _FIX
    if len(needed) >= 2 and "prompts" not in names:  # messages, answer and columns
        columns = ", ".join([*(p[0] for p in needed[1:]), *lacking])
        form = f"{function.name}(completions, {columns}, **rest)"
        fix = f"columns beside the answer need the batch's form: write {form}, or reward_fn(messages, answer)"
    raise NovaError(f"{function.name}({shown}) has neither form of a reward", where=function.where, fix=fix)


def _check_columns(function: Function, columns: Collection[str]) -> None:
    known = {"prompts", "completions", "completion_ids", *columns}
    for name, kind, has_default in function.parameters:
        if name not in known and not has_default and kind not in ("VAR_KEYWORD", "VAR_POSITIONAL"):
            what = f"{function.name} needs a column {name!r}, which the data does not have"
            raise NovaError(what, where=function.where, fix=f"the columns are: {', '.join(sorted(known))}")


def _asked(rollout: Rollout) -> str | list[Any]:
    """TRL's prompt: a string where the data's is one."""
    messages = rollout.prompt.messages
    return list(messages) if rollout.prompt.conversational else str(messages[0]["content"])


def _answered(rollout: Rollout) -> str | list[Any]:
    """TRL's completion, in the form of its prompt."""
    return list(rollout.messages[len(rollout.prompt.messages) :]) if rollout.prompt.conversational else rollout.text


def _sampled(rollout: Rollout) -> list[int]:
    """The tokens that the policy sampled, in their order."""
    return [
        token
        for sequence in rollout.sequences
        for token, mine in zip(sequence.tokens, sequence.mask, strict=True)
        if mine
    ]


def _row(rollout: Rollout) -> tuple[list[Any], Any]:
    return list(rollout.messages), rollout.prompt.answer
