"""The rollout log: everything needed to read and replay a step.

rollouts/step-000010.jsonl         one line per rollout: prompt, text, rewards, status, failure reason; `extra` if a
                                   reward function logged columns
rollouts/step-000010.safetensors   the packed batch: tokens, masks, log-probabilities, advantages; its metadata entry
                                   `reward_names` lists the columns of `rewards` as JSON
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from novarl.core.types import Batch, Credit, Scored, Scores


def write_rollouts(
    folder: Path, step: int, scored: Sequence[Scored], batch: Batch, scores: Scores, credit: Credit
) -> None:
    """Write both files of `step` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"step-{step:06d}"
    lines = [json.dumps(_line(item), ensure_ascii=False, default=str) + "\n" for item in scored]
    stem.with_suffix(".jsonl").write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    columns: dict[str, Tensor] = {}
    for part in (batch, scores, credit):
        columns |= {
            field.name: value for field in fields(part) if isinstance(value := getattr(part, field.name), Tensor)
        }
    save_file(
        {name: column.contiguous() for name, column in columns.items()},
        stem.with_suffix(".safetensors"),
        metadata={"reward_names": json.dumps(batch.reward_names)},
    )


def _line(item: Scored) -> Mapping[str, object]:
    rollout = item.rollout
    return {
        "prompt_id": rollout.prompt.id,
        "group": rollout.group,
        "index": rollout.index,
        "role": rollout.role,
        "status": "failed" if item.reward is None else rollout.status,
        "finish_reason": rollout.finish_reason,
        "messages": [dict(message) for message in rollout.messages],
        "text": rollout.text,
        "answer": rollout.prompt.answer,
        "reward": item.reward,
        "rewards": dict(item.rewards),
        "error": item.error,
        **({"extra": dict(item.extra)} if item.extra else {}),
    }
