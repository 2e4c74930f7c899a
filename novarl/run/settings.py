"""The settings of a run as plain values: `compose` reads the configuration, `run` does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from novarl.observe.trackers.registry import Tracking


@dataclass(frozen=True, slots=True)
class RunSettings:
    """`values` is the whole configuration as a mapping, `text` the contents of config.yaml, and `named_by_user(key)`
    whether the user chooses the names below a key, such as `reward`. `steps` is None if it depends on the number of
    rows. `from_python`: some values are Python objects, so no command can repeat the run."""

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
    tracking: Tracking
    values: Mapping[str, Any]
    text: str
    named_by_user: Callable[[str], bool]
    from_python: bool = False
