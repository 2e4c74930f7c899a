"""verifiers and prime-rl: `results.jsonl` of an evaluation, with `metadata.json` beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.integrations.conversations import spoken
from novarl.integrations.names import plain_settings
from novarl.integrations.readers.reading import Reading, Row, by_step, count, first_line, json_lines, number, text

FIXED = {"example_id", "prompt", "completion", "answer", "reward", "metrics", "error", "is_truncated"}
FILE, TRACES = "results.jsonl", "traces.jsonl"


def recognises(source: Path) -> bool:
    """Whether `source` has results of verifiers."""
    file = _file(source)
    return file is not None and {"example_id", "prompt", "completion"} <= set(first_line(file))


def read(source: Path) -> Reading:
    """The answers of an evaluation, as step 1."""
    file = _file(source)
    assert file is not None, "recognises() found it"
    found = Reading("verifiers", rollouts=by_step(_rows(file), "prompt_id"), config=_metadata(file))
    found.read.append(f"{file.name}: {count(sum(map(len, found.rollouts.values())), 'answer')}")
    found.absent += [
        "steps: an evaluation has none, and all answers are of step 1",
        "tokens, log-probabilities and loss",
    ]
    if found.config is None:
        found.absent.append("the settings: there is no metadata.json")
    return found


def refuse_traces(source: Path) -> None:
    """Raise NovaError for the newer format of verifiers, which is not read."""
    if source.name == TRACES or (source / TRACES).is_file():
        what, fix = "traces.jsonl of verifiers v1 is not supported", f"import {FILE}, or a JSONL file with a mapping"
        raise NovaError(what, where=str(source), fix=fix)


def _file(source: Path) -> Path | None:
    file = source / FILE if source.is_dir() else source
    return file if file.suffix == ".jsonl" and file.is_file() else None


def _metadata(file: Path) -> dict[str, Any] | None:
    beside = file.with_name("metadata.json")
    if not beside.is_file():
        return None
    try:
        return plain_settings(json.loads(beside.read_text(encoding="utf-8")))
    except (ValueError, AttributeError) as error:
        raise NovaError(f"not a JSON object ({error})", where=str(beside), fix="restore or remove it") from None


def _rows(file: Path) -> Iterator[tuple[int, Row]]:
    for place, line in json_lines(file):
        metrics = line.get("metrics") or {}
        if not isinstance(metrics, Mapping):
            raise NovaError("`metrics` is not an object", where=place, fix="restore the file")
        error = line.get("error")
        kept = {name: value for name, value in line.items() if name not in FIXED and name not in metrics}
        yield (
            1,
            {
                **spoken(line.get("prompt"), line.get("completion")),
                "prompt_id": str(line.get("example_id")),
                "answer": text(line.get("answer")),
                "reward": number(line.get("reward"), f"{place} reward"),
                "rewards": {name: number(value, f"{place} metrics.{name}") for name, value in metrics.items()},
                "status": "failed" if error else "truncated" if line.get("is_truncated") else "done",
                "error": text(error),
                "extra": kept,
            },
        )
