"""Changed settings of a resumed run: some would make it a different run and are refused, the others are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from novarl.core.config_files import read
from novarl.core.errors import NovaError
from novarl.core.rundir import RunDir

SAME = ("task", "algo", "loss")
"""Settings that must not change; `loss` only if it is a name (preferences and reward models)."""

FREE = frozenset({"run_dir", "resume", "steps", "epochs", "save_every", "eval_every", "keep", "keep_best", "log"})
"""Settings that may change without a note: they do not affect what the run learns."""


def changes(mine: Mapping[str, Any], rundir: RunDir, named_by_user: Callable[[str], bool]) -> list[str]:
    """The settings of `mine` that differ from the resumed run's config.yaml, in words. NovaError for another run."""
    file = rundir.path / "config.yaml"
    if not file.is_file():
        return []
    try:
        held = read(file)[0]
    except NovaError as error:
        fix = "restore it from a copy, or delete it: the resumed run writes it again"
        raise NovaError(error.what, where=error.where, fix=fix) from None
    for key in SAME:
        before, now = held.get(key, mine.get(key)), mine.get(key)
        if before != now and not isinstance(now, Mapping):
            raise NovaError(
                f"the existing run has {key}={_word(before)}, but this one has {key}={_word(now)}",
                where=f"run_dir={rundir.path}",
                fix=f"resume with {key}={_word(before)}, or start a new run with model=<checkpoint>/model",
            )
    before, now = dict(_leaves(held)), dict(_leaves(mine))
    # Keys added by a newer version are not changes; new names chosen by the user are.
    known = [*before, *(key for key in now if key not in before and named_by_user(key))]
    return [
        _change(key, before, now)
        for key in known
        if key.partition(".")[0] not in FREE and before.get(key) != now.get(key)
    ]


def _change(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    new = f"with {key}={_word(now[key])}" if key in now else f"without {key}"
    old = _word(before[key]) if key in before else "not set"
    return f"{new} (previously {old})"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
