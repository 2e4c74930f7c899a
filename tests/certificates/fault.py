"""What a fault is, and the ways of planting one: arguments out of place, options ignored, results scaled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """`plant` takes the function `module.function`, or a class's, and returns a faulty one."""

    name: str
    module: ModuleType | type
    function: str
    plant: Callable[[Function], Function]
    caught_by: str

    @property
    def where(self) -> str:
        return f"{self.module.__name__.rsplit('.', 1)[-1]}.{self.function}"


def shifted(position: int, axis: int = 0) -> Callable[[Function], Function]:
    """The argument at `position` is one row late."""

    def plant(function: Function) -> Function:
        def faulty(*arguments: Any, **options: Any) -> Any:
            moved = [a.roll(1, axis) if i == position else a for i, a in enumerate(arguments)]
            return function(*moved, **options)

        return faulty

    return plant


def swapped(first: int, second: int) -> Callable[[Function], Function]:
    """Two arguments in each other's place."""

    def plant(function: Function) -> Function:
        def faulty(*arguments: Any, **options: Any) -> Any:
            order = list(arguments)
            order[first], order[second] = order[second], order[first]
            return function(*order, **options)

        return faulty

    return plant


def with_options(**changed: Any) -> Callable[[Function], Function]:
    """Some options have no effect."""
    return lambda function: lambda *arguments, **options: function(*arguments, **{**options, **changed})


def scaled(factor: float, output: int | None = None) -> Callable[[Function], Function]:
    """The result, or one of several, times a factor."""

    def plant(function: Function) -> Function:
        def faulty(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            if output is None:
                return factor * result
            return tuple(factor * part if i == output else part for i, part in enumerate(result))

        return faulty

    return plant


def instead(replacement: Function) -> Callable[[Function], Function]:
    """Another formula."""
    return lambda _: replacement


def planted(
    module: ModuleType | type, function: str, *faults: tuple[str, Callable[[Function], Function], str]
) -> list[Fault]:
    """Faults of one function: what it is, how to plant it, the certificate that catches it."""
    return [Fault(name, module, function, plant, caught_by) for name, plant, caught_by in faults]
