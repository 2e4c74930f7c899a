"""`novarl sft` whose memory runs out in every micro-batch in turn: python -m benchmarks.memory given.json found.jsonl

What fails are real allocations: RLIMIT_AS leaves FREE bytes from the moment at which a micro-batch begins its
forward or its backward pass, and is lifted at the next one. The step must end all the same, with the gradient of the
run that nothing happened to, and its event. Where memory runs out at every attempt, one sentence must say so.

Freed memory that is kept in the process no limit reaches: here nothing is kept (set MALLOC_MMAP_THRESHOLD_ low).
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import novarl
from novarl import cli
from novarl.learn import accumulate
from novarl.learn.fitting import MOST
from novarl.learn.optim import Optimizer
from novarl.run import machine

FREE = {"forward": 16 << 20, "backward": 1 << 18}
"""Bytes that may still be had. The forward pass of a thousand tokens needs hundreds of megabytes; the backward pass
gives memory back as it goes, and dies only of its first large tensors."""


class Shortage:
    """Lets memory run out in micro-batch number `at` (of the first attempt), or, without one, in every micro-batch that
    can still be split; keeps the gradient that the optimiser is given."""

    def __init__(self, stage: str = "", at: int | None = None) -> None:
        self.stage, self.at = stage, at
        self.begun, self.armed, self.limited = 0, False, 0
        self.gradient: list[Tensor] = []

    def __enter__(self) -> Shortage:
        """Stands between the learner and its micro-batches, its backward passes and its optimiser."""
        self.patches = contextlib.ExitStack()
        for owner, name, replacement in (
            (accumulate, "piece", self._piece(accumulate.piece)),
            (Tensor, "backward", self._backward(Tensor.backward)),
            (Optimizer, "step", self._step(Optimizer.step)),
            (machine, "keep_freed_memory", lambda: None),
        ):
            self.patches.enter_context(patch.object(owner, name, replacement))
        return self

    def __exit__(self, *_: object) -> None:
        lift()
        self.patches.close()

    def _piece(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def piece(batch: Any, trajectories: list[int], device: torch.device) -> Any:
            lift()
            number, self.begun = self.begun, self.begun + 1
            self.armed = bool(self.stage) and (len(trajectories) > 1 if self.at is None else number == self.at)
            found = original(batch, trajectories, device)
            self._begin("forward")
            return found

        return piece

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(loss: Tensor, *given: Any, **options: Any) -> None:
            self._begin("backward")
            original(loss, *given, **options)

        return backward

    def _step(self, original: Callable[[Optimizer], tuple[float, float]]) -> Callable[[Optimizer], tuple[float, float]]:
        def step(optimizer: Optimizer) -> tuple[float, float]:
            lift()
            self.gradient = [gradient.detach().double() for gradient in optimizer.gradients()]
            return original(optimizer)

        return step

    def _begin(self, stage: str) -> None:
        if self.armed and self.stage == stage:
            self.armed, self.limited = False, self.limited + 1
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + FREE[stage], resource.RLIM_INFINITY))


def lift() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def run(words: list[str], out: Path, shortage: Shortage) -> tuple[int, str, list[dict[str, Any]]]:
    """(exit code, what was written on stderr, events) of `novarl sft`."""
    said = io.StringIO()
    with shortage, contextlib.redirect_stderr(said):
        code = cli.main(["sft", *words, f"run_dir={out}"])
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return code, said.getvalue(), events


def distance(found: list[Tensor], whole: list[Tensor]) -> float:
    """|found - whole| / |whole| of the gradient as one vector."""
    difference = sum(float((a - b).square().sum()) for a, b in zip(found, whole, strict=True))
    return (difference / sum(float(b.square().sum()) for b in whole)) ** 0.5


def injections(words: list[str], out: Path) -> Iterator[dict[str, float]]:
    """For each micro-batch and stage: whether the step ended, the gradient's error, and the events that tell of it."""
    plain = Shortage()
    run(words, out / "plain", plain)
    for at in range(plain.begun):
        for stage in FREE:
            shortage = Shortage(stage, at)
            code, _, events = run(words, out / f"{stage}-{at}", shortage)
            error = distance(shortage.gradient, plain.gradient) if code == 0 else float("inf")
            told = sum(event["kind"] == "split_micro_batch" for event in events)
            again = shortage.begun > plain.begun
            yield {"failed": float(again), "ended": float(code == 0), "told": float(told == 1), "error": error}


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    out = Path(given["out"])
    found = list(injections(given["words"], out))
    ten = {}
    for stage in FREE:
        shortage = Shortage(stage)
        code, said, _ = run(given["words"], out / f"{stage}-always", shortage)
        clear = code == 2 and said.count("\n") == 1 and re.search(rf"out of memory {MOST} times in a row", said)
        ten[stage] = {"clear": bool(clear), "attempts": shortage.limited, "said": said.strip()}
    line = {"injections": found, "ten": ten, "version": novarl.__version__}
    Path(sys.argv[2]).write_text(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
