"""What TRL's GRPO and RLOO trainers generate, as rows of the run directory: texts, rewards, advantages, and the values
of each token that TRL computes.

TRL passes none of this to callbacks and keeps only a part of it. Two methods of the trainer are therefore wrapped while
it trains: `_generate_and_score_completions`, whose result has the tokens in the order of the logged texts, and
`_get_per_token_logps_and_entropies`, which computes log-probabilities and entropies for the loss. Both return what they
returned before. Tensors stay where they are until the step has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any

from novarl.data.pieces import piece
from novarl.integrations.conversations import spoken
from novarl.observe.rollouts import texts

GENERATE, MEASURE = "_generate_and_score_completions", "_get_per_token_logps_and_entropies"
PER_TOKEN = {
    "sampling_per_token_logps": "behavior_logp",
    "old_per_token_logps": "old_logp",
    "ref_per_token_logps": "ref_logp",
}
"""Columns of TRL's batch, and ours."""

DIGITS = 6
"""Decimals of the values of a token, in nats: half the size of the file, and less than float32's error of a logit."""


_Known = tuple[dict[str, list[Any]], tuple[int, ...], list[int], str]


@dataclass
class _Step:
    """The answers of a step; and for each, the tokens of prompt and completion, and the positions of the generated ones
    in the completion. Both are empty where another process holds them."""

    number: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    places: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)
    groups: int = 0
    changed: bool = False


class RolloutRecorder:
    """Records the training rollouts of `trainer` at the steps that `wants` says; `fail` gets the errors."""

    def __init__(
        self, trainer: Any, group_size: int, wants: Callable[[int], bool], fail: Callable[[Exception], None]
    ) -> None:
        self._trainer, self._size, self._wants, self._fail = trainer, max(1, group_size), wants, fail
        self._number = 1
        self._step: _Step | None = None
        self._generating = False
        self._measured: list[tuple[Any, Any, Any, Any]] = []
        self._counts: list[dict[str, float]] = []
        self._vocabulary: dict[int, str | list[int]] = {}
        self._generate, self._measure = getattr(trainer, GENERATE), getattr(trainer, MEASURE, None)
        setattr(trainer, GENERATE, self._generating_too)
        if self._measure is not None:
            setattr(trainer, MEASURE, self._measuring_too)

    def release(self) -> None:
        """Give the trainer its own methods back."""
        for name in (GENERATE, MEASURE):
            self._trainer.__dict__.pop(name, None)

    def begin(self, step: int) -> None:
        """`step` is the number of the optimizer step that begins."""
        self._number = step

    def take(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """The rows of the step whose answers are new, or better known, since the last call."""
        measured, self._measured = self._measured, []
        if self._step is not None:
            _join(self._step, measured)
            if self._step.changed:
                self._step.changed = False
                yield self._step.number, self._step.rows

    def counts(self) -> dict[str, float]:
        """Numbers of answers and groups, as means over the generations since the last call; empty without any."""
        counts, self._counts = self._counts, []
        return {name: fmean(one[name] for one in counts) for name in counts[0]} if counts else {}

    def _generating_too(self, *args: Any, **kwargs: Any) -> Any:
        self._generating = True
        try:
            batch = self._generate(*args, **kwargs)
        finally:
            self._generating = False
        try:
            if self._trainer.model.training:
                self._add(batch)
        except Exception as error:  # noqa: BLE001 - the user's training goes on, whatever it is
            self._fail(error)
        return batch

    def _measuring_too(self, model: Any, ids: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._measure is not None
        found = self._measure(model, ids, mask, *args, **kwargs)
        if not self._generating and self._step is not None and self._trainer.model.training:
            self._measured.append((ids, mask, found[0].detach(), None if found[1] is None else found[1].detach()))
        return found

    def _add(self, batch: Mapping[str, Any]) -> None:
        """The rows of one generation, whose texts and rewards are the last in the trainer's logs."""
        trainer, held = self._trainer, len(batch["completion_ids"])
        number, offset = held * trainer.accelerator.num_processes, held * trainer.accelerator.process_index
        rows = _rows(trainer._logs, number, trainer.reward_weights.tolist(), self._size)
        self._counts.append(_counts(rows, self._size))
        if not self._wants(self._number):
            self._step = None
            return
        if self._step is None or self._step.number != self._number:
            self._step = _Step(self._number)
        step = self._step
        known = dict(enumerate(self._tokens(batch), start=offset))
        for at, row in enumerate(rows):
            row["group"] += step.groups
            if at not in known:  # its tokens are in another process
                step.places.append(((), []))
                continue
            columns, key, own, status = known[at]
            columns["advantages"] = [row["extra"].pop("advantage")] * len(own)
            columns["pieces"] = self._pieces(columns["tokens"])
            row |= {"columns": columns, "status": status, "finish_reason": "stop" if status == "done" else "length"}
            step.places.append((key, own))
        step.rows += rows
        step.groups += -(-len(rows) // self._size)
        step.changed = True

    def _tokens(
        self, batch: Mapping[str, Any]
    ) -> Iterator[tuple[dict[str, list[Any]], tuple[int, ...], list[int], str]]:
        """For each answer of this process its columns, its tokens with the prompt's, the positions of the generated
        ones, and its status. Results of tools are not generated."""
        ids, mask, prompts, prompt_mask = (
            batch[name].tolist() for name in ("completion_ids", "completion_mask", "prompt_ids", "prompt_mask")
        )
        values = {ours: batch[name].tolist() for name, ours in PER_TOKEN.items() if batch.get(name) is not None}
        tools = batch["tool_mask"].tolist() if batch.get("tool_mask") is not None else mask
        ends = {*self._trainer.eos_token_ids, getattr(self._tokenizer, "pad_token_id", None)}
        for at, row in enumerate(ids):
            real = [place for place, used in enumerate(mask[at]) if used]
            own = [place for place in real if tools[at][place]]
            columns: dict[str, list[Any]] = {"tokens": [row[place] for place in own], "turns": _turns(own)}
            columns |= {name: [_rounded(column[at][place]) for place in own] for name, column in values.items()}
            prompt = (token for token, used in zip(prompts[at], prompt_mask[at], strict=True) if used)
            ended = bool(real) and row[real[-1]] in ends
            yield columns, (*prompt, *(row[place] for place in real)), own, "done" if ended else "truncated"

    @property
    def _tokenizer(self) -> Any:
        processor = self._trainer.processing_class
        return getattr(processor, "tokenizer", processor)

    def _pieces(self, tokens: Sequence[int]) -> list[str]:
        for token in tokens:
            if token not in self._vocabulary:
                self._vocabulary[token] = piece(self._tokenizer, token)
        return texts(tokens, self._vocabulary)


def _rows(logs: Mapping[str, Any], number: int, weights: Sequence[float], size: int) -> list[dict[str, Any]]:
    """The last `number` answers in TRL's logs, without their tokens."""
    rewards = {name: _last(values, number) for name, values in logs["rewards"].items()}
    extra = {name: _last(values, number) for name, values in logs.get("extra", {}).items()}
    prompts, completions = _last(logs["prompt"], number), _last(logs["completion"], number)
    rows = []
    for at, advantage in enumerate(_last(logs["advantages"], number)):
        each = {name: _finite(values[at]) for name, values in rewards.items()}
        given = [weight * value for weight, value in zip(weights, each.values(), strict=True) if value is not None]
        rows.append(
            {
                **spoken(prompts[at], completions[at]),
                "group": at // size,
                "index": at % size,
                "reward": sum(given) if given else None,
                "rewards": each,
                "extra": {"advantage": advantage} | {name: values[at] for name, values in extra.items()},
            }
        )
    return rows


def _join(step: _Step, measured: Sequence[tuple[Any, Any, Any, Any]]) -> None:
    """Put what the updates measured into the rows with the same tokens, which have the same values. The first update
    of an answer counts."""
    waiting: dict[tuple[int, ...], list[int]] = {}
    for at, (key, _) in enumerate(step.places):
        if key and "logp" not in step.rows[at]["columns"]:
            waiting.setdefault(key, []).append(at)
    for ids, mask, logp, entropy in measured if waiting else ():
        values = {"logp": logp.tolist()} | ({} if entropy is None else {"entropy": entropy.tolist()})
        for at, (row, used) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
            key = tuple(token for token, real in zip(row, used, strict=True) if real)
            for place in waiting.pop(key, ()):
                own = step.places[place][1]
                columns = {name: [_rounded(column[at][one]) for one in own] for name, column in values.items()}
                step.rows[place]["columns"] |= columns
                step.changed = True


def _counts(rows: Sequence[Mapping[str, Any]], size: int) -> dict[str, float]:
    groups = [{row["reward"] for row in rows[first : first + size]} for first in range(0, len(rows), size)]
    equal = sum(len(rewards) == 1 for rewards in groups)
    return {"episodes": len(rows), "groups_kept": len(groups), "zero_variance_groups": equal}


def _turns(own: Sequence[int]) -> list[int]:
    """The turn of each generated token: a new one begins after a gap."""
    turns: list[int] = []
    for at, place in enumerate(own):
        turns.append(turns[-1] + (place != own[at - 1] + 1) if turns else 0)
    return turns


def _last(values: Any, number: int) -> list[Any]:
    return list(islice(values, max(0, len(values) - number), None))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _rounded(value: float) -> float | None:
    return round(value, DIGITS) if math.isfinite(value) else None
