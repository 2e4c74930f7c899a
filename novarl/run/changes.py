"""What the settings of a run that goes on have in common with those it had: some changes would make it another run and
are refused, of others it is said what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from novarl.core.config_files import read
from novarl.core.errors import NovaError
from novarl.core.rundir import RunDir

SAME = ("task", "algo", "loss")
"""What a run is about; `loss` where it is a name (of preferences, of a reward model)."""

FREE = frozenset({"run_dir", "resume", "steps", "epochs", "save_every", "eval_every", "keep", "keep_best", "log"})
"""What says how far a run goes and what it leaves, never what it learns."""


def changes(mine: Mapping[str, Any], rundir: RunDir, named_by_user: Callable[[str], bool]) -> list[str]:
    """Each setting in which a run that goes on with the values `mine` differs from its config.yaml, in words. NovaError
    where it would be another run."""
    file = rundir.path / "config.yaml"
    if not file.is_file():
        return []
    try:
        held = read(file)[0]
    except NovaError as error:
        fix = "restore it from a copy, or delete it: a run that goes on writes it anew"
        raise NovaError(error.what, where=error.where, fix=fix) from None
    for key in SAME:
        before, now = held.get(key, mine.get(key)), mine.get(key)
        if before != now and not isinstance(now, Mapping):
            raise NovaError(
                f"the run there is one of {key}={_word(before)}, and this is {key}={_word(now)}",
                where=f"run_dir={rundir.path}",
                fix=f"continue it with {key}={_word(before)}, or start a new run with model=<checkpoint>/model",
            )
    before, now = dict(_leaves(held)), dict(_leaves(mine))
    # What only a later version has is no change; what is new where users name the keys is one.
    known = [*before, *(key for key in now if key not in before and named_by_user(key))]
    return [
        _change(key, before, now)
        for key in known
        if key.partition(".")[0] not in FREE and before.get(key) != now.get(key)
    ]


def _change(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    new = f"with {key}={_word(now[key])}" if key in now else f"without {key}"
    old = _word(before[key]) if key in before else "not there"
    return f"{new} (it was {old})"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
