"""The rollouts of a run: which steps have some, the groups of a step, one group, and one prompt across steps.

Files are opened when they are asked for. Nothing reads all of them, except a search, which does it in slices of time.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from novarl.core.errors import NovaError
from novarl.dashboard.runs import Run
from novarl.observe.rollouts import COLUMNS, RolloutRow, read_rollouts

KEPT = 6
"""Steps whose answers stay in memory."""

TOKENS = 3000
"""Tokens of an answer that are sent at first; the page asks for more."""


ACROSS = 400
"""Steps in which the answers to one prompt are looked for."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which answers match. A limit is inclusive; None and empty texts match every answer."""

    text: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    length_min: int | None = None
    length_max: int | None = None
    finish_reason: str = ""
    status: str = ""

    @property
    def active(self) -> bool:
        return self != Filter()

    def __call__(self, row: RolloutRow) -> bool:
        if self.status and row.status != self.status:
            return False
        if self.finish_reason and (row.finish_reason or "none") != self.finish_reason:
            return False
        if not _within(row.reward, self.reward_min, self.reward_max):
            return False
        return _within(length(row), self.length_min, self.length_max) and self._says(row)

    def _says(self, row: RolloutRow) -> bool:
        if not self.text:
            return True
        words = self.text.casefold()
        said = [row.prompt, row.text, row.error or "", row.answer or "", row.prompt_id]
        said += [json.dumps(message, ensure_ascii=False) for message in row.messages]
        return any(words in str(text).casefold() for text in said)


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


def length(row: RolloutRow) -> int:
    """Tokens, or characters if the run did not record tokens."""
    return len(row.tokens) or len(row.text)


@dataclass
class Samples:
    """The rollouts of one run."""

    run: Run
    _listed: tuple[int, list[int]] = (-1, [])
    _rows: OrderedDict[int, tuple[object, list[RolloutRow], dict[str, Any]]] = field(default_factory=OrderedDict)
    _found: OrderedDict[str, dict[int, list[dict[str, Any]]]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _searching: threading.Lock = field(default_factory=threading.Lock)

    def steps(self) -> list[int]:
        """The logged steps, in order."""
        folder = self.run.file("rollouts")
        if folder is None:
            return []
        changed = folder.stat().st_mtime_ns
        if changed != self._listed[0]:
            names = (entry.name for entry in os.scandir(folder))
            numbers = (name[5:-6] for name in names if name.startswith("step-") and name.endswith(".jsonl"))
            self._listed = (changed, sorted(int(number) for number in numbers if number.isdecimal()))
        return self._listed[1]

    def rows(self, step: int) -> list[RolloutRow]:
        """The answers of a step. NovaError if it was not logged or a file is damaged."""
        return self._step(step)[1]

    def _step(self, step: int) -> tuple[object, list[RolloutRow], dict[str, Any]]:
        """The state of the step's files, its answers and the scales of its measures."""
        with self._lock:
            return self._read(step)

    def _read(self, step: int) -> tuple[object, list[RolloutRow], dict[str, Any]]:
        if step not in self.steps():
            raise NovaError(f"the rollouts of step {step} were not logged", where=self.run.name, fix="see /api/steps")
        stem = f"rollouts/step-{step:06d}"
        files = [self.run.file(f"{stem}{ending}") for ending in (".jsonl", ".safetensors", ".update.safetensors")]
        if files[0] is None:
            raise NovaError("is not there any more", where=f"{self.run.name}/{stem}.jsonl")
        state = [None if file is None else (file, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        known = self._rows.get(step)
        if known is None or known[0] != state:
            try:
                rows = read_rollouts(self.run.path / stem)
            except (TypeError, AttributeError, ValueError) as error:
                what = f"has a line that is not an answer ({error})"
                raise NovaError(what, where=f"{self.run.name}/{stem}.jsonl") from None
            known = self._rows[step] = (state, rows, scales(rows))
            while len(self._rows) > KEPT:
                self._rows.popitem(last=False)
        self._rows.move_to_end(step)
        return known

    def groups(self, step: int, chosen: Filter, page: int, per: int) -> dict[str, Any]:
        """One page of the groups of a step that have an answer that matches."""
        rows = self.rows(step)
        groups: dict[int, list[RolloutRow]] = {}
        for row in rows:
            groups.setdefault(row.group, []).append(row)
        kept = {number: members for number, members in groups.items() if any(map(chosen, members))}
        shown = list(kept.items())[page * per : (page + 1) * per]
        return {
            "step": step,
            "answers": len(rows),
            "groups_total": len(groups),
            "groups_found": len(kept),
            "page": page,
            "pages": max(1, -(-len(kept) // per)),
            "tokens_recorded": any(row.tokens for row in rows),
            "finish_reasons": sorted({row.finish_reason or "none" for row in rows}),
            "statuses": sorted({row.status for row in rows}),
            "groups": [_group_line(number, members, chosen) for number, members in shown],
        }

    def group(self, step: int, number: int, chosen: Filter, tokens: int = TOKENS) -> dict[str, Any]:
        """The answers of a group, with at most `tokens` tokens each. NovaError if there is no such group."""
        members = [row for row in self.rows(step) if row.group == number]
        if not members:
            raise NovaError(f"step {step} has no group {number}", where=self.run.name, fix="see /api/groups")
        first = members[0]
        answers = [{**_answer(row, tokens), "matches": chosen(row)} for row in members]
        return {
            "step": step,
            "group": number,
            "prompt": first.prompt,
            "prompt_id": first.prompt_id,
            "key": prompt_key(first.prompt_id, first.prompt),
            "reference": first.answer,
            "answers": answers,
            "scales": self._step(step)[2],
        }

    def across(self, key: str, seconds: float = 1.0) -> dict[str, Any]:
        """The answers to one prompt in every step, or in `ACROSS` evenly spaced ones. Reads for about `seconds`; ask
        again until `searched` is `of`."""
        with self._searching:
            return self._across(key, seconds)

    def _across(self, key: str, seconds: float) -> dict[str, Any]:
        known = self._found.setdefault(key, {})
        self._found.move_to_end(key)
        while len(self._found) > KEPT:
            self._found.popitem(last=False)
        logged, until = self.steps(), time.monotonic() + seconds
        steps = evenly(logged, ACROSS)
        for step in steps:
            if step not in known:
                known[step] = [_short(line) for line in self._lines(step, (key,)) if _key_of(line) == key]
                if time.monotonic() > until:
                    break
        found = {step: known[step] for step in steps if known.get(step)}
        searched = sum(step in known for step in steps)
        return {
            "key": key,
            "searched": searched,
            "of": len(steps),
            "logged": len(logged),
            "steps": [{"step": step, "answers": answers} for step, answers in found.items()],
        }

    def find(self, chosen: Filter, after: int, backwards: bool, seconds: float = 1.0) -> dict[str, Any]:
        """The next step (or the one before) with an answer that matches. Reads for about `seconds`: if it found none
        and `searched_to` is a step, ask again with `after` set to it."""
        order = [step for step in self.steps() if (step < after if backwards else step > after)]
        until = time.monotonic() + seconds
        for step in reversed(order) if backwards else order:
            if chosen.text and not any(self._lines(step, (chosen.text,), fold=True)):
                pass
            elif any(chosen(row) for row in self.rows(step)):
                return {"step": step, "searched_to": step}
            if time.monotonic() > until:
                return {"step": None, "searched_to": step}
        return {"step": None, "searched_to": None}

    def _lines(self, step: int, words: Sequence[str], fold: bool = False) -> Iterator[Mapping[str, Any]]:
        """The lines of a step that may contain one of `words`, found without parsing the others."""
        file = self.run.file(f"rollouts/step-{step:06d}.jsonl")
        if file is None:
            return
        data = file.read_bytes()
        change: Callable[[bytes], bytes] = (
            (lambda text: text.decode(errors="replace").casefold().encode()) if fold else bytes
        )
        sought = {
            change(json.dumps(word, ensure_ascii=plain)[1:-1].encode(errors="replace"))
            for word in words
            for plain in (True, False)
        }
        if not any(word in change(data) for word in sought):
            return
        for line in data.splitlines():
            if any(word in change(line) for word in sought):
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    continue  # cut by a crash; the step's own page says so
                if isinstance(value, dict):
                    yield value


def evenly(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of the values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return (
        [values[place * (len(values) - 1) // (most - 1)] for place in range(most)] if most > 1 else list(values[:most])
    )


def prompt_key(prompt_id: str, prompt: str) -> str:
    """What makes two prompts the same one: the id, or the text where the run has no ids."""
    return prompt_id or prompt


def _key_of(line: Mapping[str, Any]) -> str:
    messages = line.get("messages") or []
    asked = next((m for m in messages if m.get("role") == "user"), messages[0] if messages else {})
    return prompt_key(str(line.get("prompt_id", "")), str(line.get("prompt") or asked.get("content") or ""))


def _short(line: Mapping[str, Any]) -> dict[str, Any]:
    names = ("index", "reward", "status", "finish_reason", "role", "error", "group")
    return {**{name: line.get(name) for name in names}, "text": str(line.get("text", ""))[:20_000]}


def _group_line(number: int, members: Sequence[RolloutRow], chosen: Filter) -> dict[str, Any]:
    rewards = [row.reward for row in members if row.reward is not None]
    return {
        "group": number,
        "prompt_id": members[0].prompt_id,
        "prompt": members[0].prompt[:240],
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "answers": [
            {
                "index": row.index,
                "role": row.role,
                "reward": row.reward,
                "status": row.status,
                "finish_reason": row.finish_reason,
                "length": length(row),
                "matches": chosen(row),
            }
            for row in members
        ],
    }


def _answer(row: RolloutRow, tokens: int) -> dict[str, Any]:
    names = ("index", "role", "reward", "rewards", "status", "finish_reason", "error", "extra", "messages", "text")
    columns = {name: _cut(getattr(row, name), tokens) for name in COLUMNS.values() if getattr(row, name)}
    return {
        **{name: getattr(row, name) for name in names},
        "length": len(row.tokens) or None,
        "characters": len(row.text),
        "advantage": row.advantage,
        "columns": columns,
    }


def _cut(column: Sequence[Any], most: int) -> list[Any]:
    """The first values; numbers with seven digits, the precision in which they were computed."""
    return [float(f"{value:.7g}") if isinstance(value, float) else value for value in column[:most]]


MEASURES: Mapping[str, Callable[[RolloutRow], list[float]]] = {
    "advantage": lambda row: list(row.advantages),
    "ratio": lambda row: [a - b for a, b in zip(row.logp, row.old_logp, strict=False)],
    "kl": lambda row: [a - b for a, b in zip(row.logp or row.old_logp, row.ref_logp, strict=False)],
    "entropy": lambda row: list(row.entropy),
    "mismatch": lambda row: [a - b for a, b in zip(row.old_logp, row.behavior_logp, strict=False)],
    "value": lambda row: list(row.values),
    "process": lambda row: list(row.token_reward),
    "return": lambda row: list(row.returns),
    "loss": lambda row: list(row.loss),
}
"""What tokens are colored by. The page computes the same from the columns."""


def scales(rows: Sequence[RolloutRow]) -> dict[str, dict[str, float]]:
    """For each measure that the step recorded: the 98th percentile of its size (`full` color), and the largest."""
    found = {}
    for name, measure in MEASURES.items():
        values = sorted(abs(value) for row in rows for value in measure(row) if value == value)
        if values:
            found[name] = {"full": values[int(0.98 * (len(values) - 1))], "most": values[-1]}
    return found
