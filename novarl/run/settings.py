"""What a run must know of its configuration, as plain values: `compose` reads the configuration, `run` never does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RunSettings:
    """`values` is the whole configuration as a mapping, `text` what config.yaml will hold, and `named_by_user(key)`
    whether the user chooses the names below a key, as those of `reward`. Steps are null where they follow from the
    number of rows."""

    kind: str
    model: str
    seed: int
    device: str
    threads: int | None
    run_dir: str | None
    resume: str | None
    steps: int | None
    save_every: int | None
    eval_every: int | None
    keep: int
    keep_best: bool
    console: bool
    tensorboard: bool
    values: Mapping[str, Any]
    text: str
    named_by_user: Callable[[str], bool]
