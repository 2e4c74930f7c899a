"""What a user's reward function is given: decided by the names of its parameters, before the run.

| parameter | one rollout at a time | a whole batch (TRL) |
|---|---|---|
| `messages` (or `conversation`) | the conversation, the policy's last answer at its end | |
| `completion`, `response`, `text`, `solution_str`, ... | the policy's answer as text | |
| `prompt`; `prompts` | the prompt as text | strings or lists of messages, as in the data |
| `completions`, `completion_ids` | | strings or lists of messages; the sampled tokens |
| `answer` | the column that `answer_key` names, else `answer` | the same, as a list |
| `trainer_state`, `log_extra`, `log_metric` | as TRL documents them (see `services`) | the same |
| any other name | the column of this name | the same, as a list |

A function that takes `completions` or `completion_ids`, or nothing but `**columns`, is given the batch. `ground_truth`
is found at verl's `reward_model.ground_truth` too. `**columns` takes all that is not named.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from novarl.core.errors import NovaError
from novarl.core.types import Rollout
from novarl.data.formats import at_path
from novarl.rewards.loaded_file import Call, Function
from novarl.rewards.services import NAMES as SERVICES

CONVERSATION = ("messages", "conversation")
TEXT = ("completion", "response", "text", "solution_str", "predict_str", "output", "prediction", "generation")
BATCH = ("completions", "completion_ids")
REFERENCES = (
    *("answer", "solution", "ground_truth", "reference", "reference_answer", "final_answer", "expected_answer"),
    *("target", "gold", "label", "output", "response", "completion"),
)
"""What data sets call the right answer, the likeliest name first."""
_VERL = {"ground_truth": "reward_model.ground_truth"}
_NEITHER = (
    "name it messages (the conversation), completion or response (text), or completions (TRL's form, a batch): "
    "reward_fn(messages, answer), reward_fn(completion, answer) or reward_func(completions, **columns)"
)


@dataclass(frozen=True, slots=True)
class Signature:
    """A reward function and what it takes: `text` is the parameter that receives the policy's answer as text."""

    function: Function
    form: Literal["row", "batch"]
    text: str | None = None

    @property
    def takes_all(self) -> bool:
        return any(kind == "VAR_KEYWORD" for _, kind, _ in self.function.parameters)

    @property
    def named(self) -> list[str]:
        return [name for name, kind, _ in self.function.parameters if not kind.startswith("VAR_")]

    @property
    def services(self) -> list[str]:
        """Those of TRL's callbacks that the function is given."""
        return [name for name in SERVICES if name in self.named or (self.takes_all and self.form == "batch")]

    @property
    def reads(self) -> set[str] | None:
        """The data's columns that the function may read; None for all of them."""
        if self.takes_all:
            return None
        columns = set(self.named) - {self.text, *CONVERSATION}
        return columns | {path.partition(".")[0] for name, path in _VERL.items() if name in columns}

    def row(self, rollout: Rollout) -> Call:
        """The arguments for one rollout."""
        given = _columns(rollout)
        given |= {name: list(rollout.messages) for name in CONVERSATION}
        given["prompt"] = "\n".join(str(message["content"]) for message in rollout.prompt.messages)
        if self.text is not None:
            given[self.text] = rollout.text
        return self._call(given, _columns(rollout) if self.takes_all else {})

    def batch(self, rollouts: Iterable[Rollout]) -> Call:
        """TRL's arguments: a list over the batch by name."""
        rows = [_columns(rollout) for rollout in rollouts]
        names = sorted({name for row in rows for name in row})
        given: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        given["prompts"] = [_asked(rollout) for rollout in rollouts]
        given["completions"] = [_answered(rollout) for rollout in rollouts]
        given["completion_ids"] = [sampled(rollout) for rollout in rollouts]
        return self._call(given, given if self.takes_all else {})

    def check(self, columns: Collection[str]) -> None:
        """NovaError where a parameter without a default is supplied by nothing: `columns` are the data's, those inside
        of others by their path (`extra_info.answer`)."""
        supplied = {"prompts", *BATCH} if self.form == "batch" else {"prompt", *CONVERSATION, self.text}
        supplied |= {name for name, path in _VERL.items() if path in columns}
        supplied |= {*SERVICES, *(name for name in columns if "." not in name)}
        for name, kind, has_default in self.function.parameters:
            if name not in supplied and not has_default and not kind.startswith("VAR_"):
                fix = lacking_fix(name, columns)
                if name == "environments":
                    fix = "environments of TRL's environment_factory are not supported: use rollout.env_path"
                elif name == "answer":
                    fix += "; if the reward does not need it, write answer=None"
                what = f"{self.function.name} needs the column {name!r}, which the data does not have"
                raise NovaError(what, where=self.function.where, fix=fix)

    def _call(self, given: Mapping[str, Any], rest: Mapping[str, Any]) -> Call:
        """Of what is `given`, the arguments that the function names, and `rest` for its `**columns`. What the rows do
        not have is left to the function's default."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, kind, has_default in self.function.parameters:
            if name in SERVICES or kind.startswith("VAR_") or (name not in given and has_default):
                continue
            if kind == "POSITIONAL_ONLY":
                args.append(given.get(name))
            else:
                kwargs[name] = given.get(name)
        kwargs |= {name: value for name, value in rest.items() if name not in self.named}
        return args, kwargs


def signature(function: Function) -> Signature:
    """How a function is called. NovaError where nothing that it takes holds the policy's answer."""
    parameters = [(name, kind) for name, kind, _ in function.parameters]
    named = [name for name, kind in parameters if not kind.startswith("VAR_")]
    if any(name in named for name in BATCH) or [kind for _, kind in parameters] == ["VAR_KEYWORD"]:
        return Signature(function, "batch")
    if any(name in named for name in CONVERSATION):
        return Signature(function, "row")
    text = next((name for name in named if name in TEXT), None)
    if text is not None:
        return Signature(function, "row", text)
    marks = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    shown = ", ".join(marks.get(kind, "") + name for name, kind in parameters)
    near = [
        (name, found[0])
        for name in named
        if (found := difflib.get_close_matches(name, (*CONVERSATION, *TEXT, *BATCH), n=1, cutoff=0.8))
    ]
    fix = f"did you mean {near[0][1]!r} instead of {near[0][0]!r}? " if near else ""
    what = f"{function.name}({shown}) has no parameter for the policy's answer"
    raise NovaError(what, where=function.where, fix=fix + _NEITHER)


def lacking_fix(name: str, columns: Collection[str]) -> str:
    """What to do where no column is called `name`: the nearest of the data's columns."""
    near = nearest(name, columns)
    shown = ", ".join(sorted(column for column in columns if "." not in column)) or "none"
    if near is None:
        return f"columns besides the prompt: {shown}"
    if name == "answer":
        return f"did you mean the column {near!r}? set answer_key={near}; columns besides the prompt: {shown}"
    if near == "answer" or "." in near:
        key = "" if near == "answer" else f"set answer_key={near} and "
        return f"did you mean {near!r}? {key}rename the parameter to answer; columns besides the prompt: {shown}"
    return f"did you mean {near!r}? rename the parameter; columns besides the prompt: {shown}"


def nearest(name: str, columns: Collection[str]) -> str | None:
    """The column that probably is what `name` means: inside another, of the same meaning, or spelled alike."""
    ordered = sorted(columns, key=lambda column: (column.count("."), column))
    lasts = {column: column.rpartition(".")[2] for column in ordered}
    if (inside := next((column for column in ordered if lasts[column] == name), None)) is not None:
        return inside
    if name in REFERENCES:
        for other in REFERENCES:
            if (found := next((column for column in ordered if lasts[column] == other), None)) is not None:
                return found
    near = difflib.get_close_matches(name, ordered, n=1)
    return near[0] if near else None


def _columns(rollout: Rollout) -> dict[str, Any]:
    """The row's columns by name, the reference answer as `answer`."""
    given = dict(rollout.prompt.extra)
    for name, path in _VERL.items():
        if name not in given and (found := at_path(given, path)) is not None:
            given[name] = found
    if rollout.prompt.answer is not None:
        given["answer"] = rollout.prompt.answer
    return given


def _asked(rollout: Rollout) -> str | list[Any]:
    """TRL's prompt: a string where the data's is one."""
    messages = rollout.prompt.messages
    return list(messages) if rollout.prompt.conversational else str(messages[0]["content"])


def _answered(rollout: Rollout) -> str | list[Any]:
    """TRL's completion, in the form of its prompt."""
    return list(rollout.messages[len(rollout.prompt.messages) :]) if rollout.prompt.conversational else rollout.text


def sampled(rollout: Rollout) -> list[int]:
    """The tokens that the policy sampled, in their order."""
    return [
        token
        for sequence in rollout.sequences
        for token, mine in zip(sequence.tokens, sequence.mask, strict=True)
        if mine
    ]
