"""slime: the files of `--save-debug-rollout-data`, which torch saved.

They are read with `weights_only=True`, which runs no code from the file. A file that needs more is refused.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.integrations.conversations import messages, spoken
from novarl.integrations.readers.reading import Reading, Row, count, grouped, number, span, text, whole

FIXED = {"prompt", "response", "label", "reward", "status", "group_index", "index", "tokens", "response_length"}
COLUMNS = {"loss_mask", "rollout_log_probs"}
STATUS = {"completed": "done", "truncated": "truncated", "aborted": "failed", "failed": "failed", "pending": "failed"}


def recognises(source: Path) -> bool:
    """Whether `source` has files that torch saved."""
    return any(zipfile.is_zipfile(file) for file in _files(source)[0][:1])


def read(source: Path) -> Reading:
    """The answers in the dumps of slime."""
    files, evaluations = _files(source)
    found = Reading("slime")
    for file in files:
        saved = _load(file)
        step = whole(saved.get("rollout_id"), f"{file} rollout_id")
        rows = [_answer(sample, f"{file} sample {place}") for place, sample in enumerate(saved["samples"])]
        found.rollouts[step] = grouped(rows, "prompt_id")
    number_of = sum(len(rows) for rows in found.rollouts.values())
    found.read.append(f"{count(len(files), 'file')}: {count(number_of, 'answer')}, {span(found.rollouts)}")
    found.absent += ["metrics: slime sends them to its loggers", "texts of tokens: the file has ids only", "advantages"]
    if evaluations:
        found.notes.append(f"not read: {count(len(evaluations), 'file')} of evaluations")
    if any(row["reward"] is None and row["rewards"] for rows in found.rollouts.values() for row in rows):
        found.absent.append("reward: the rewards are named, and which of them was trained on is not recorded")
    return found


def _files(source: Path) -> tuple[list[Path], list[Path]]:
    """The files of training rollouts in order, and those of evaluations."""
    files = [source] if source.is_file() and source.suffix == ".pt" else sorted(source.glob("*.pt"), key=_order)
    evaluations = [file for file in files if "eval_" in file.name]
    return [file for file in files if file not in evaluations], evaluations


def _order(file: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", file.stem)
    return (int(digits[-1]) if digits else -1, file.name)


def _load(file: Path) -> dict[str, Any]:
    import torch

    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        what = "contains objects whose loading would run code from the file"
        fix = "save prompt, response and reward as JSONL, and import that"
        raise NovaError(what, where=str(file), fix=fix) from None
    except (OSError, RuntimeError, EOFError) as error:
        raise NovaError(f"cannot be read ({error})", where=str(file), fix="give a complete file") from None
    if not isinstance(saved, dict) or not isinstance(saved.get("samples"), list):
        raise NovaError("not a rollout of slime: `samples` is missing", where=str(file), fix="give another file")
    return saved


def _answer(sample: dict[str, Any], place: str) -> Row:
    reward = sample.get("reward")
    named = reward if isinstance(reward, dict) else {}
    status = STATUS.get(str(sample.get("status")), "done")
    row: Row = {
        **spoken(sample.get("prompt"), sample.get("response")),
        "prompt_id": str(sample["group_index"]) if sample.get("group_index") is not None else _prompt(sample),
        "answer": text(sample.get("label")),
        "reward": None if isinstance(reward, dict) else number(reward, f"{place} reward"),
        "rewards": {key: value for key, value in named.items() if isinstance(value, int | float)},
        "status": status,
        "error": f"slime's status is {sample.get('status')}" if status == "failed" else None,
        "extra": {key: _plain(value) for key, value in sample.items() if key not in FIXED | COLUMNS and _says(value)},
    }
    if columns := dict(_columns(sample)):
        row["columns"] = columns
    return row


def _prompt(sample: dict[str, Any]) -> str:
    prompt = sample.get("prompt")
    return text(messages(prompt) or prompt) or ""


def _columns(sample: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Ids and log-probabilities of the generated tokens, if they are all there."""
    tokens, length = _plain(sample.get("tokens") or []), int(sample.get("response_length") or 0)
    if not length or len(tokens) < length:
        return
    mask = _plain(sample.get("loss_mask")) or [1] * length
    logp = _plain(sample.get("rollout_log_probs"))
    if len(mask) != length:
        return
    yield "tokens", [token for token, used in zip(tokens[-length:], mask, strict=True) if used]
    if logp is not None and len(logp) == length:
        yield "behavior_logp", [value for value, used in zip(logp, mask, strict=True) if used]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _says(value: Any) -> bool:
    """Whether a field was filled in."""
    return value is not None and not (isinstance(value, list | dict | str) and not value)
