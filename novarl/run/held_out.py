"""evals/: the score of every held-out row at an evaluation (docs/run_directory.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from novarl.core.checkpoint import write_atomic
from novarl.core.types import Message, Scored
from novarl.loops.evaluate import Evaluation


def write_rows(run: Path, step: int, found: Evaluation) -> None:
    """Write `evals/step-NNNNNN.jsonl`, one line per held-out row. Nothing if the evaluation has no rows."""
    lines = [json.dumps(line, ensure_ascii=False, allow_nan=False, default=str) + "\n" for line in _lines(found)]
    if lines:
        (run / "evals").mkdir(exist_ok=True)
        # A lone surrogate, legal in JSON and not in UTF-8, becomes \\udXXX: JSON's own escape.
        text = "".join(lines).encode("utf-8", "backslashreplace").decode()
        write_atomic(run / "evals" / f"step-{step:06d}.jsonl", text)


def _lines(found: Evaluation) -> Iterator[dict[str, Any]]:
    for row in found.rows:
        yield _answer(row, found.samples.get(row.rollout.group, ()))
    for name, score in found.scores:
        yield {"prompt_id": name, "score": _finite(score)}


def _answer(row: Scored, samples: Sequence[float]) -> dict[str, Any]:
    rollout = row.rollout
    line: dict[str, Any] = {"prompt_id": rollout.prompt.id, "prompt": _question(rollout.prompt.messages)}
    line |= {"score": _finite(row.reward), "text": rollout.text}
    if rollout.status != "done":
        line["status"] = rollout.status
    if row.reward is None:
        line["error"] = row.error
    return line | ({"samples": list(samples)} if samples else {})


def _question(messages: Sequence[Message]) -> str:
    """The last user message, or the last message if there is none."""
    said = [message for message in messages if message.get("role") == "user"] or list(messages)
    return str(said[-1].get("content", "")) if said else ""


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
