"""The rollout log: everything needed to read and replay a step (format: docs/run_directory.md).

rollouts/step-000010.jsonl                one line per rollout: prompt, text, rewards, status, failure reason;
                                          `extra` if a reward function logged columns
rollouts/step-000010.safetensors          the packed batch: tokens, masks, log-probabilities, advantages. The metadata
                                          entry `about` is JSON: `reward_names` (the columns of `rewards`) and
                                          `vocabulary` (id -> text, or a list of bytes for a part of a character)
rollouts/step-000010.update.safetensors   per token, at its first update: `logp`, `entropy`, `loss`
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from novarl.core.types import Batch, Credit, Scored, Scores, Tokenizer
from novarl.data.pieces import piece

SPARSE = 10
"""Above the size limit, one in this many of the steps that `every` selects is logged."""


@dataclass(slots=True)
class RolloutLog:
    """Writes the rollouts of step 1 and of every `every`-th step to `folder`; None: of none.

    Once the folder holds more than `limit` bytes (None: no limit), only one in `SPARSE` of these steps is written.
    """

    folder: Path
    every: int | None
    limit: float | None
    tokenizer: Tokenizer
    _vocabulary: dict[int, str | list[int]] = field(default_factory=dict)
    _size: int | None = None

    def wants(self, step: int) -> bool:
        """Whether `step` is logged."""
        if self.every is None:
            return False
        return step == 1 or step % (self.every * (SPARSE if self.full else 1)) == 0

    @property
    def full(self) -> bool:
        """Whether the folder holds more than `limit` bytes."""
        return self.limit is not None and self.size > self.limit

    @property
    def size(self) -> int:
        """The bytes in the folder."""
        if self._size is None:  # a resumed run finds the files of the steps before
            self._size = sum(file.stat().st_size for file in self.folder.glob("step-*") if file.suffix != ".part")
        return self._size

    def write(self, step: int, scored: Sequence[Scored], batch: Batch, scores: Scores, credit: Credit) -> None:
        """Write the text and the batch of a step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = self.folder / f"step-{step:06d}"
        lines = [json.dumps(_line(item), ensure_ascii=False, default=str) + "\n" for item in scored]
        columns = {
            field.name: value
            for part in (batch, scores, credit)
            for field in fields(part)
            if isinstance(value := getattr(part, field.name), Tensor)
        }
        about = {"reward_names": batch.reward_names, "vocabulary": self._pieces(batch.tokens)}
        # One entry: safetensors writes several in any order, and equal runs should write equal bytes.
        self._save(columns, f"{stem}.safetensors", about=json.dumps(about, ensure_ascii=False))
        # The text last: a reader that finds it finds the batch too.
        name = f"{stem}.jsonl"
        Path(f"{name}.part").write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
        self._place(name)

    def add(self, step: int, measured: Mapping[str, Tensor]) -> None:
        """Write what the step's updates measured."""
        self._save(measured, str(self.folder / f"step-{step:06d}.update.safetensors"))

    def _save(self, columns: Mapping[str, Tensor], name: str, **metadata: str) -> None:
        narrow = {
            key: column.to(torch.int32) if column.dtype == torch.int64 else column for key, column in columns.items()
        }
        save_file({key: column.contiguous() for key, column in narrow.items()}, f"{name}.part", metadata=metadata)
        self._place(name)

    def _place(self, name: str) -> None:
        """Rename a complete file to its name, so that readers never see half of one."""
        size = self.size + os.path.getsize(f"{name}.part")
        os.replace(f"{name}.part", name)
        self._size = size

    def _pieces(self, tokens: Tensor) -> dict[int, str | list[int]]:
        """The text of every token that occurs in a batch."""
        found = tokens.unique().tolist()
        self._vocabulary |= {token: piece(self.tokenizer, token) for token in found if token not in self._vocabulary}
        return {token: self._vocabulary[token] for token in found}


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
