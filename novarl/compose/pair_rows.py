"""The rows of a preference run, with the reference's log-probabilities."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from novarl.compose.preference_plan import PreferencePlan
from novarl.compose.rows import demonstrations, raw, source_of
from novarl.config.preference import DPOConfig, RMConfig
from novarl.core.checkpoint import DISK
from novarl.core.errors import NovaError
from novarl.core.types import Batch, Sequence
from novarl.data.dataset import RowCounts
from novarl.data.formats import BadRow, Columns
from novarl.data.pairs import Labelled, Pair, Reading, load_labelled, load_pairs
from novarl.data.rows import Rows, set_aside
from novarl.data.unused import Unused
from novarl.distributed.ranks import Ranks
from novarl.learn.preference import unpaired, with_reference
from novarl.models.load import Policy
from novarl.tasks.registry import Task

Answers = Pair | Labelled
Item = TypeVar("Item")

REFERENCE = "logprobs.safetensors"
"""In a run's `reference` folder: `logprobs` [N], the reference's log-probabilities of all trained tokens of all rows,
in order. The metadata identify the rows."""


def preference_rows(config: DPOConfig | RMConfig, plan: PreferencePlan, policy: Policy) -> Rows[Answers]:
    """Pairs or labelled answers: training and held-out rows."""
    bad: list[BadRow] = []
    unused = Unused()
    reading = Reading(
        tokenizer=policy.tokenizer,
        max_length=min(config.max_length or policy.context, policy.context),
        on_long=config.on_long,
        apply_chat_template=config.apply_chat_template,
        template_kwargs=policy.template_kwargs,
        max_bad_rows=config.max_bad_rows,
        report=bad.append,
        unused=unused,
        keys=Columns(
            chosen=config.chosen_key,
            rejected=config.rejected_key,
            prompt=config.prompt_key,
            messages=config.messages_key,
            completion=config.completion_key,
            text=config.text_key,
            label=config.label_key,
        ),
    )

    def split(
        load: Callable[..., tuple[list[Item], RowCounts]],
        aside: Callable[[list[Item], int], tuple[list[Item], list[Item]]],
    ) -> tuple[list[Item], list[Item], RowCounts]:
        if plan.task is not None:
            items, counts = load(raw(task_pairs(plan.task)), replace(reading, keys=Columns()))
        else:
            items, counts = load(source_of(config, "data"), reading)
        if config.eval.data:
            held_out, _ = load(source_of(config, "eval.data"), reading)
            return items, held_out[: config.eval.n], counts
        train, held_out = aside(items, config.eval.n)
        return train, held_out, counts

    if not plan.labelled:
        train, held_out, counts = split(load_pairs, set_aside)
        margin = config.margin if isinstance(config, RMConfig) else 0.0
        return Rows([_with_margin(pair, margin) for pair in train], list(held_out), counts, bad, unused)
    of_rows, measured, counts = split(load_labelled, labels_aside)
    answers = _flat(of_rows)
    if not plan.strangers:
        return Rows(list(answers), list(_flat(measured)), counts, bad, unused)
    if len(answers) < 2:
        what = f"loss={plan.loss} compares answers of different rows, but there is only one row"
        raise NovaError(what, where="data", fix="use at least two rows")
    trained = [_fitted(pair, reading.max_length) for pair in unpaired(answers)]
    return Rows(list(trained), list(_flat(measured)), counts, bad, unused)


def task_pairs(task: Task) -> list[dict[str, Any]]:
    """A task's demonstrations as pairs. The rejected answer is the next different answer to another problem."""
    rows = demonstrations(task)
    pairs = []
    for index, row in enumerate(rows):
        question, answer = row["messages"]
        others = (rows[(index + ahead) % len(rows)]["messages"][1] for ahead in range(1, len(rows)))
        other = next((said for said in others if said["content"] != answer["content"]), None)
        if other is not None:
            pairs.append({"id": row["id"], "prompt": [question], "chosen": [answer], "rejected": [other]})
    return pairs


def labels_aside(
    of_rows: list[tuple[Labelled, ...]], most: int
) -> tuple[list[tuple[Labelled, ...]], list[tuple[Labelled, ...]]]:
    """`set_aside` stratified by label: good and bad rows often alternate, so every k-th row may have the same label."""
    held: list[int] = []
    for label in (1.0, 0.0):
        kind = [index for index, row in enumerate(of_rows) if row[0].label == label]
        held += set_aside(kind, round(most * len(kind) / len(of_rows)))[1]
    chosen = set(held)
    train = [row for index, row in enumerate(of_rows) if index not in chosen]
    return train, [of_rows[index] for index in sorted(chosen)]


def _with_margin(pair: Pair, margin: float) -> Pair:
    return replace(pair, margin=margin) if margin and pair.margin is None else pair


def _flat(of_rows: list[tuple[Labelled, ...]]) -> list[Labelled]:
    """All first answers of the rows, then all second ones, so that neighbours belong to different prompts."""
    sides = max((len(row) for row in of_rows), default=0)
    return [row[side] for side in range(sides) for row in of_rows if side < len(row)]


def _fitted(pair: Pair, max_length: int) -> Pair:
    """A row paired with another row's answer, which is truncated to fit behind this row's prompt."""
    other = pair.rejected
    columns = (other.tokens, other.mask, other.behavior_logp, other.kept_logmass, other.versions)
    return replace(pair, rejected=Sequence(*(column[:max_length] for column in columns)))  # type: ignore[arg-type]


def record_reference(
    rows: Rows[Any], logprobs: Callable[[Batch], Tensor], *, folder: Path, ranks: Ranks
) -> Rows[Answers]:
    """The rows with the reference's log-probabilities, which are computed now and written to `folder` for a resume."""
    tape = Tape([], logprobs)
    recorded = _with_tape(rows, tape)
    if ranks.rank == 0:
        _write(folder / REFERENCE, torch.cat(tape.parts), _digest(rows))
    ranks.wait()
    return recorded


def recall_reference(rows: Rows[Any], folder: Path) -> Rows[Answers]:
    """The same for a resumed run, read from `folder`. NovaError if the file is unusable or belongs to other rows."""
    return _with_tape(rows, Tape(_read(folder / REFERENCE, _digest(rows))))


def _with_tape(rows: Rows[Any], tape: Tape) -> Rows[Answers]:
    return replace(rows, train=with_reference(rows.train, tape), held_out=with_reference(rows.held_out, tape))


class Tape:
    """Log-probabilities [N] of consecutive batches: recorded from `source`, or replayed from a recording."""

    def __init__(self, parts: list[Tensor], source: Callable[[Batch], Tensor] | None = None) -> None:
        self.parts, self.source, self.at = parts, source, 0

    def __call__(self, batch: Batch) -> Tensor:
        if self.source is not None:
            self.parts.append(self.source(batch).cpu())
            return self.parts[-1]
        begin, self.at = self.at, self.at + batch.tokens.numel()
        return self.parts[0][begin : self.at]


def _digest(rows: Rows[Answers]) -> str:
    """A hash of the rows and tokens that the log-probabilities belong to."""
    found = hashlib.blake2b(digest_size=16)
    for row in chain(rows.train, rows.held_out):
        sides = (row.chosen, row.rejected) if isinstance(row, Pair) else (row.sequence,)
        for side in sides:
            found.update(repr((row.id, side.tokens, side.mask)).encode())
    return found.hexdigest()


def _write(file: Path, logprobs: Tensor, digest: str) -> None:
    from safetensors.torch import save

    beside = file.with_name(f".{file.name}.writing")
    file.parent.mkdir(exist_ok=True)
    DISK.write(beside, save({"logprobs": logprobs}, metadata={"rows": digest}))
    DISK.sync(beside)
    DISK.rename(beside, file)


def _read(file: Path, digest: str) -> list[Tensor]:
    from safetensors import SafetensorError, safe_open

    fix = "restore it, or start a new run"
    if not file.is_file():
        raise NovaError("the reference's log-probabilities are missing", where=str(file), fix=fix)
    try:
        with safe_open(file, "pt") as stored:
            of, logprobs = (stored.metadata() or {}).get("rows"), stored.get_tensor("logprobs")
    except (SafetensorError, OSError) as error:
        raise NovaError(
            f"the reference's log-probabilities cannot be read: {error}", where=str(file), fix=fix
        ) from error
    if of != digest:
        what = "the rows have changed: the reference's log-probabilities belong to other rows"
        raise NovaError(what, where=str(file), fix="resume with the same data and keys, or start a new run")
    return [logprobs]
