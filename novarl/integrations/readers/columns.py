"""Any JSONL file, with a mapping from our fields to its columns: `prompt=question text=answer reward=score`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError, nearest
from novarl.integrations.conversations import messages
from novarl.integrations.readers.reading import (
    Reading,
    Row,
    by_step,
    count,
    first_line,
    json_lines,
    number,
    some,
    span,
    text,
    whole,
)

FIELDS = ("prompt", "messages", "text", "answer", "reward", "step", "prompt_id", "status", "finish_reason", "error")


def recognises(source: Path) -> bool:
    """Whether the columns have our names, so that no mapping is needed."""
    return source.suffix == ".jsonl" and source.is_file() and {"prompt", "text"} <= set(first_line(source))


def read(source: Path, mapping: Mapping[str, str] | None = None) -> Reading:
    """The answers in the file. Raises NovaError for a field or a column that does not exist."""
    if not source.is_file():
        raise NovaError("a mapping needs one JSONL file", where=str(source), fix="give the file, not its directory")
    columns = set(first_line(source))
    if mapping is None:
        mapping = {name: name for name in FIELDS if name in columns}
    _check(mapping, columns, source)
    found = Reading(
        "jsonl", rollouts=by_step(_rows(source, mapping), "prompt_id" if "prompt_id" in mapping else "prompt")
    )
    if not found.rollouts:
        raise NovaError("the file is empty", where=str(source), fix="give another file")
    number_of = sum(len(rows) for rows in found.rollouts.values())
    found.read.append(f"{source.name}: {count(number_of, 'answer')}, {span(found.rollouts)}")
    found.absent += ["metrics", "tokens and log-probabilities"]
    found.absent += [name for name in ("answer", "reward") if name not in mapping]
    if "step" not in mapping:
        found.absent.append("step: all answers are of step 1")
    return found


def _check(mapping: Mapping[str, str], columns: set[str], source: Path) -> None:
    for name, column in mapping.items():
        if name not in FIELDS:
            raise NovaError(f"unknown field {name!r}", where=f"{name}={column}", fix=nearest(name, FIELDS))
        if column not in columns:
            what = f"the first line of {source.name} has no column {column!r}"
            raise NovaError(what, where=f"{name}={column}", fix=f"its columns are {some(sorted(columns))}")
    if "text" not in mapping or not {"prompt", "messages"} & set(mapping):
        fix = f"add prompt=COLUMN and text=COLUMN; the columns are {some(sorted(columns))}"
        raise NovaError("the mapping needs prompt (or messages) and text", where=str(source), fix=fix)


def _rows(source: Path, mapping: Mapping[str, str]) -> Iterator[tuple[int, Row]]:
    kept = set(mapping.values())
    for place, line in json_lines(source):
        given: dict[str, Any] = {name: line.get(column) for name, column in mapping.items()}
        step = whole(given.pop("step"), f"{place} {mapping['step']}") if "step" in given else 1
        row: Row = {name: text(value) for name, value in given.items() if name not in ("reward", "messages")}
        if "reward" in given:
            row["reward"] = number(given["reward"], f"{place} {mapping['reward']}")
        if "messages" in given:
            row["messages"] = _conversation(given["messages"], place)
        elif (asked := messages(given["prompt"])) is not None:
            row["messages"] = [*asked, {"role": "assistant", "content": row["text"]}]
            row["prompt"] = "\n".join(message["content"] for message in asked)
        row["extra"] = {name: value for name, value in line.items() if name not in kept}
        yield step, row


def _conversation(value: Any, place: str) -> list[dict[str, Any]]:
    found = messages(value)
    if found is None:
        raise NovaError("not a list of messages with roles", where=place, fix='[{"role": "user", "content": "…"}, …]')
    return found
