"""The built-in tasks by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from novarl.core.errors import NovaError, nearest
from novarl.tasks import arithmetic, bandit, lexical, sentiment, sort
from novarl.tasks.task import Problem, Row, Split, Task

__all__ = ["TASKS", "Problem", "Row", "Split", "Task", "find_task"]

TASKS: dict[str, Callable[..., Task]] = {
    "sort": sort.task,
    "arithmetic": arithmetic.task,
    "lexical": lexical.task,
    "sentiment": sentiment.task,
    "bandit": bandit.task,
}
"""The builder of each task; its keyword arguments are the task's options (`task_options.NAME=VALUE`)."""


def find_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """The task with its options. NovaError for an unknown task or option (with the nearest name) or a wrong type."""
    if name not in TASKS:
        raise NovaError(f"unknown task {name!r}", where="task", fix=nearest(name, TASKS))
    kinds = get_type_hints(TASKS[name])
    known = list(inspect.signature(TASKS[name]).parameters)
    for option, value in (options or {}).items():
        where = f"task_options.{option}"
        if option not in known:
            fix = nearest(option, known) if known else f"remove it: task={name} has no options"
            raise NovaError(f"task={name} has no such option", where=where, fix=fix)
        fits = isinstance(value, int | float) if kinds[option] is float else isinstance(value, kinds[option])
        if isinstance(value, bool) or not fits:
            what = f"is {value!r}, not {'a number' if kinds[option] is float else 'a whole number'}"
            raise NovaError(what, where=where, fix="use a number")
    return TASKS[name](**(options or {}))
