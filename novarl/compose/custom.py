"""Custom surrogates and estimators from a Python file: `loss.surrogate` and `adv.estimator` as `file.py:name`.

    def surrogate(logp, old_logp, advantage, mask) -> loss, or (loss, {"clip_fraction": ...})      [N], one per token
    def estimator(rewards, group) -> advantage                                                     [S], one per answer

A surrogate with the keywords `clip_low` and `clip_high` gets the run's values. The file runs in this process, on every
rank; each function is tried on a few numbers before anything is written. Errors in it are a NovaError with its line.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from novarl.core.errors import NovaError

SURROGATE_FORM = "name(logp, old_logp, advantage, mask) -> loss"
ESTIMATOR_FORM = "name(rewards, group) -> advantage"
BOUNDS = ("clip_low", "clip_high")


def is_own(name: str) -> bool:
    """Whether the name is a user's function; built-in names have no dot."""
    return ".py" in name


def own_surrogate(
    spec: str | Callable[..., Any], bounds: Mapping[str, float], *, clip_given: bool
) -> Callable[..., tuple[Tensor, Mapping[str, Tensor]]]:
    """The user's surrogate in the form of ours, with those `bounds` that it takes, tried once. NovaError if it is
    invalid."""
    function, where = _load(spec, "loss.surrogate")
    taken = {name: bound for name, bound in bounds.items() if _takes(function, name)}
    if clip_given and not taken:
        fix = "give it the keywords clip_low and clip_high, or leave clip out"
        raise NovaError(f"{spec} has no bounds to be given", where="clip", fix=fix)

    def surrogate(
        logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        returned = _call(function, where, logp, old_logp, advantage, mask, **taken)
        loss, stats = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        _check_tensor(loss, logp, where, what="loss")
        if not loss.requires_grad:
            raise NovaError("the loss does not depend on logp, so it has no gradient", where=where)
        if not isinstance(stats, Mapping) or set(stats) - {"clip_fraction"}:
            raise NovaError("the statistics must be {'clip_fraction': one value per token}", where=where)
        return torch.where(mask, loss, 0.0), stats

    logp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    surrogate(logp, logp.detach(), torch.tensor([1.0, -1.0, 0.5]), torch.ones(3, dtype=torch.bool))
    return surrogate


def own_estimator(spec: str | Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """The user's estimator in the form of a built-in one, called once as a test. NovaError if it is invalid."""
    function, where = _load(spec, "adv.estimator")

    def estimator(rewards: Tensor, group: Tensor) -> Tensor:
        advantage = _call(function, where, rewards, group)
        _check_tensor(advantage, rewards, where, what="advantage")
        exact: Tensor = advantage.detach().to(rewards.dtype)
        return exact

    estimator(torch.tensor([0.0, 1.0, 0.5, 0.0]), torch.tensor([1, 1, 2, 2]))
    return estimator


def _load(spec: str | Callable[..., Any], key: str) -> tuple[Callable[..., Any], str]:
    """The function named by `file.py:name`, or the given function, with its location."""
    if not isinstance(spec, str):
        code = getattr(spec, "__code__", None)
        path = code.co_filename if code is not None else "python"
        return _checked(spec, path, getattr(spec, "__name__", "function"), key)
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        fix = "write it as file.py:function_name"
        raise NovaError(f"{spec!r} is not a function in a Python file", where=key, fix=fix)
    if not Path(path).is_file():
        raise NovaError("no such file", where=path, fix="give a path relative to the current directory")
    module = _run(Path(path))
    function = getattr(module, name, None)
    if not callable(function):
        own = [one for one, value in vars(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(name, own, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"its functions are: {', '.join(own) or 'none'}"
        raise NovaError(f"has no function {name!r}", where=path, fix=fix)
    return _checked(function, path, name, key)


def _checked(function: Callable[..., Any], path: str, name: str, key: str) -> tuple[Callable[..., Any], str]:
    line = getattr(getattr(function, "__code__", None), "co_firstlineno", None)
    where = f"{path}:{line} {name}" if line else f"{path} {name}"
    form = SURROGATE_FORM if key == "loss.surrogate" else ESTIMATOR_FORM
    try:
        needed = [name for name in BOUNDS if key == "loss.surrogate" and _takes(function, name)]
        inspect.signature(function).bind(*range(form.count(",") + 1), **dict.fromkeys(needed))
    except TypeError as error:
        raise NovaError(f"{error}", where=where, fix=f"write it as {form.replace('name', name)}") from error
    return function, where


def _run(path: Path) -> ModuleType:
    """The file as a new module that is not in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise NovaError(f"does not compile: {error.msg}", where=f"{path}:{error.lineno}") from error
    except Exception as error:
        raise NovaError(f"raised {_said(error)}", where=_place(error, path, str(path))) from error
    return module


def _call(function: Callable[..., Any], where: str, /, *arguments: Tensor, **options: float) -> Any:
    try:
        return function(*arguments, **options)
    except NovaError:
        raise
    except Exception as error:
        file = Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
        raise NovaError(f"raised {_said(error)}", where=_place(error, file, where)) from error


def _check_tensor(found: Any, like: Tensor, where: str, *, what: str) -> None:
    if not isinstance(found, Tensor):
        raise NovaError(f"the {what} must be a tensor, got {found!r:.60}", where=where)
    if found.shape != like.shape:
        shapes = f"{list(like.shape)}, got {list(found.shape)}"
        raise NovaError(f"the {what} must have shape {shapes}", where=where, fix="return one value each, without a sum")
    if not bool(torch.isfinite(found).all()):
        raise NovaError(f"the {what} is not finite", where=where)


def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _place(error: Exception, path: Path, otherwise: str) -> str:
    """`file:line` of the deepest frame within the user's file."""
    mine = [one for one in traceback.extract_tb(error.__traceback__) if Path(one.filename).resolve() == path.resolve()]
    return f"{otherwise.split(':')[0].split(' ')[0]}:{mine[-1].lineno}" if mine else otherwise
