"""verl: the files of `trainer.rollout_data_dir`, one `<step>.jsonl` for each step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from novarl.integrations.readers.reading import (
    Reading,
    Row,
    by_step,
    count,
    first_line,
    json_lines,
    number,
    span,
    text,
    whole,
)

FIXED = {"input", "output", "gts", "score", "step"}


def recognises(source: Path) -> bool:
    """Whether `source` has lines of verl."""
    return any({"input", "output", "score"} <= set(first_line(file)) for file in _files(source)[:1])


def read(source: Path) -> Reading:
    """The answers in the dumps of verl."""
    files = _files(source)
    found = Reading("verl", rollouts=by_step(row for file in files for row in _rows(file)))
    number_of = sum(len(rows) for rows in found.rollouts.values())
    found.read.append(f"{count(len(files), 'JSONL file')}: {count(number_of, 'answer')}, {span(found.rollouts)}")
    found.notes.append("reward is verl's score; answers to the same prompt in a step are a group")
    found.absent += ["metrics: verl sends them to its loggers", "tokens, log-probabilities and advantages"]
    return found


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source] if source.suffix == ".jsonl" else []
    return sorted((file for file in source.glob("*.jsonl") if file.stem.isdigit()), key=lambda file: int(file.stem))


def _rows(file: Path) -> Iterator[tuple[int, Row]]:
    for place, line in json_lines(file):
        step = whole(line.get("step", file.stem), place)
        yield (
            step,
            {
                "prompt": text(line.get("input")) or "",
                "text": text(line.get("output")) or "",
                "answer": text(line.get("gts")),
                "reward": number(line.get("score"), f"{place} score"),
                "extra": {name: value for name, value in line.items() if name not in FIXED},
            },
        )
