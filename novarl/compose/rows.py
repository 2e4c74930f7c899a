"""The rows of a run, from a task or a data file, with a held-out split and counts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from novarl.config.base import RunConfig
from novarl.config.objects import is_object
from novarl.config.preference import DPOConfig, RMConfig
from novarl.config.tree import EvalConfig, RLConfig, SFTConfig
from novarl.core.errors import NovaError
from novarl.core.types import Prompt, Sequence as TokenSequence
from novarl.data.dataset import load_rl, load_sft
from novarl.data.formats import BadRow, Columns, detect
from novarl.data.rows import Rows, set_aside
from novarl.data.sources import RawRow, from_python, read
from novarl.data.unused import Unused
from novarl.models.load import Policy
from novarl.tasks.registry import Task


def subject(config: SFTConfig | DPOConfig | RMConfig) -> dict[str, str | None]:
    """The data arguments (if the rows have prompts) and the model of this run, for the commands of a summary."""
    named = [(name, getattr(config, name)) for name in ("data", "prompt_key", "messages_key")]
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in named if value is not None)
    return {"data": words if words and _has_prompts(config) else None, "base": shlex.quote(config.model)}


def _has_prompts(config: SFTConfig | DPOConfig | RMConfig) -> bool:
    if config.data is None or is_object(config.data):
        return False
    try:
        first = list(islice(read(config.data), 8))
        detect(first, "rl", keys=Columns(messages=config.messages_key, prompt=config.prompt_key), where=config.data)
    except NovaError:
        return False
    return True


def source_of(config: RunConfig, key: str) -> str | list[RawRow]:
    """The source of `data` or `eval.data`: a file name, or rows from Python objects."""
    given = config.object(key)
    if given is not None:
        return from_python(given, key, shown=config.given_as(key))
    named: str = config.data if key == "data" else config.eval.data  # type: ignore[attr-defined, assignment]
    if is_object(named):
        what = f"{named} was an object of the Python program that started the run"
        raise NovaError(what, where=key, fix="resume in Python with the same objects and resume='auto'")
    return named


def raw(rows: Iterable[Mapping[str, Any]]) -> list[RawRow]:
    """A task's rows as if read from a file, with the row's id as its location."""
    return [
        RawRow(index, str(row["id"]), {key: value for key, value in row.items() if key != "id"})
        for index, row in enumerate(rows)
    ]


def longest_prompt(config: RLConfig | EvalConfig, policy: Policy, *, max_tokens: int) -> int:
    """Maximum number of tokens per prompt: `max_length`, limited by the context minus the answer."""
    room = policy.context - max_tokens
    if room < 1:
        raise NovaError(
            f"answers of {max_tokens} tokens leave no room for a prompt in a context of {policy.limit}",
            where="rollout.max_tokens",
            fix="lower it",
        )
    return min(config.max_length or room, room)


def longest_sequence(config: RLConfig, rows: Rows[Prompt], policy: Policy, *, max_tokens: int) -> int:
    """Maximum number of tokens of a sampled sequence; several turns may fill the policy's context."""
    if config.rollout.max_turns > 1:
        return policy.context
    return max((len(prompt.tokens) for prompt in rows.train), default=0) + max_tokens


def _reading(
    config: RLConfig | EvalConfig | SFTConfig, policy: Policy, max_length: int, bad: list[BadRow]
) -> dict[str, Any]:
    """How rows are read; those that cannot be used are added to `bad`."""
    return {
        "tokenizer": policy.tokenizer,
        "max_length": max_length,
        "on_long": config.on_long,
        "apply_chat_template": config.apply_chat_template,
        "template_kwargs": policy.template_kwargs,
        "max_bad_rows": config.max_bad_rows,
        "report": bad.append,
    }


def rl_rows(config: RLConfig | EvalConfig, task: Task | None, policy: Policy, *, max_tokens: int) -> Rows[Prompt]:
    """Training and held-out prompts."""
    bad: list[BadRow] = []
    options = _reading(config, policy, longest_prompt(config, policy, max_tokens=max_tokens), bad)
    keys: dict[str, Any] = {
        "messages_key": config.messages_key,
        "prompt_key": config.prompt_key,
        "answer_key": config.answer_key,
    }
    if task is not None:
        asked = raw(task.rows("held_out", seed=0)[: config.eval.n]) if config.eval.n else []
        if isinstance(config, EvalConfig):
            return Rows([], *load_rl(asked, **options), bad)
        held_out = load_rl(asked, **options)[0] if asked else []
        train, counts = load_rl(raw(task.rows("train", seed=0)), **options)
        return Rows(train, held_out, counts, bad)
    assert config.data is not None
    unused = Unused()
    prompts, counts = load_rl(source_of(config, "data"), **options, **keys, unused=unused)
    if isinstance(config, EvalConfig):
        return Rows([], prompts[: config.eval.n], counts, bad, unused)
    if config.eval.data:
        held_out, _ = load_rl(source_of(config, "eval.data"), **options, **keys)
        return Rows(prompts, held_out[: config.eval.n], counts, bad, unused)
    return Rows(*set_aside(prompts, config.eval.n), counts, bad, unused)


def sft_rows(config: SFTConfig, task: Task | None, policy: Policy) -> Rows[TokenSequence]:
    """Training and held-out sequences."""
    bad: list[BadRow] = []
    options = _reading(config, policy, min(config.max_length or policy.context, policy.context), bad)
    keys: dict[str, Any] = {
        "messages_key": config.messages_key,
        "prompt_key": config.prompt_key,
        "completion_key": config.completion_key,
        "text_key": config.text_key,
    }
    if task is not None:
        sequences, counts = load_sft(raw(demonstrations(task)), **options)
        return Rows(sequences, [], counts, bad)
    assert config.data is not None
    sizes: list[int] = []
    unused = Unused()
    sequences, counts = load_sft(source_of(config, "data"), **options, **keys, sizes=sizes, unused=unused)
    if config.eval.data:
        held_out, _ = load_sft(source_of(config, "eval.data"), **options, **keys)
        return Rows(sequences, held_out[: config.eval.n], counts, bad, unused)
    return Rows(*set_aside(sequences, config.eval.n, sizes), counts, bad, unused)


def demonstrations(task: Task) -> list[dict[str, Any]]:
    """A task's demonstrations as rows with ids."""
    return [
        {"id": f"{task.name}/demonstration/{index}", **row} for index, row in enumerate(task.demonstrations(seed=0))
    ]
