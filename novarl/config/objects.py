"""A configuration from Python keyword arguments, some of which may be objects that cannot be written to a file.

Each object gets a name, `python:<name>`, which is the value in the configuration and in config.yaml; the object itself
is kept with the configuration (`Config.object`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from novarl.config.base import Config
from novarl.config.foreign.rows import Alias, Hint
from novarl.config.load import Tree, entries_of, parse
from novarl.config.names import rows_of, single
from novarl.core.errors import NovaError

PREFIX = "python:"
PLAIN = (str, int, float, bool, type(None))
OBJECTS = ("model", "tokenizer", "data", "eval.data", "engine", "rollout.env_path")
"""Keys whose values may be objects. `reward` and the keys in `FUNCTIONS` also take functions."""
FUNCTIONS = ("loss.surrogate", "adv.estimator")
REWARDS = ("reward_funcs", "reward_fn")
"""Other libraries' names of `reward`, for a function or a list of functions."""


def is_object(text: object) -> bool:
    """Whether a value is the name of a Python object."""
    return isinstance(text, str) and text.startswith(PREFIX)


def from_python(tree: type[Tree], settings: Mapping[str, Any], where: str) -> Tree:
    """The configuration described by keyword arguments: nested dictionaries, dotted names and all aliases that the
    command line knows. Errors are the same as for a file, with `where` instead of the file's name."""
    objects: dict[str, Any] = {}
    for name, value in settings.items():
        _check_kind(name, value, tree, where)
    given = {_object_key(name, value, tree): name for name, value in settings.items()}
    settings = {key: settings[name] for key, name in given.items()}
    values = {name: _plain(name, value, objects) for name, value in settings.items()}
    if isinstance(tokenizer := values.pop("tokenizer", None), str) and not is_object(tokenizer):
        objects["tokenizer"] = tokenizer  # by name
    if "tokenizer" in objects and "model" not in objects:
        what = "a tokenizer is given, and the model is named, which brings its own"
        raise NovaError(what, where=f"{where} tokenizer", fix="leave it out, or give the model as an object")
    if values.pop("engine", None) is not None and "engine" not in objects:
        what = f"must be an Engine, or a function that makes one for a policy, got {settings['engine']!r:.60}"
        raise NovaError(what, where=f"{where} engine")
    return parse(tree, list(entries_of(values, where, tree))).with_objects(objects, given)


def _check_kind(name: str, value: Any, tree: type[Config], where: str) -> None:
    """Refuse another library's object of settings, and rows that are given as columns."""
    if isinstance(value, PLAIN):
        return
    if (hint := single(tree, Hint).get(name)) is not None:
        raise NovaError(hint.what, where=f"{where} {name}", fix=hint.fix)
    if _object_key(name, value, tree) == "data" and isinstance(value, Mapping):
        if hasattr(next(iter(value.values()), None), "column_names"):
            what = f"is a dataset with several splits: {', '.join(map(str, value))}"
            raise NovaError(what, where=f"{where} {name}", fix=f"select one: {name}=dataset['train']")
        if not any(rows_of(f"{name}.{part}", tree) for part in value):
            what = "a dict of columns is not supported"
            raise NovaError(what, where=f"{where} {name}", fix="pass a list of dicts, one per row")


def _object_key(name: str, value: Any, tree: type[Config]) -> str:
    """The key of an object that is given under another library's name, such as `train_dataset`."""
    alias = single(tree, Alias).get(name)
    return alias.new[0] if alias and alias.new[0] in OBJECTS and not isinstance(value, PLAIN) else name


def _plain(path: str, value: Any, objects: dict[str, Any]) -> Any:
    """The value in the form of a configuration file; objects are stored in `objects`."""
    if isinstance(value, Path):
        return str(value)
    if path in REWARDS and callable(value):
        return _named(f"reward.{_name(value)}", value, objects)
    if path in REWARDS and isinstance(value, list | tuple):
        return [_plain(path, part, objects) for part in value]
    if path == "reward" or path.startswith("reward."):
        return _reward(path, value, objects)
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{path}.{name}", part, objects) for name, part in value.items()}
    if path in OBJECTS and not isinstance(value, PLAIN):
        return _named(path, value, objects)
    if path in FUNCTIONS and callable(value):
        return _named(path, value, objects, name=f"{_name(value)}.py")
    if isinstance(value, list | tuple) and all(isinstance(part, (*PLAIN, Path, Mapping, list)) for part in value):
        return [_plain(path, part, objects) for part in value]
    if isinstance(value, PLAIN):
        return value
    if hasattr(value, "item") and getattr(value, "size", None) == 1:  # a NumPy or torch scalar
        return value.item()
    raise NovaError(
        f"must be a plain value, got {type(value).__name__}", where=path, fix="use a number, a string, a list or a dict"
    )


def _reward(path: str, value: Any, objects: dict[str, Any]) -> Any:
    """`reward` as a function, a list, or a mapping by name; each is a function, a name or a file, with its settings."""
    if callable(value):
        return {_name(value): {"source": _named(f"reward.{_name(value)}", value, objects)}}
    if isinstance(value, list | tuple):
        merged: dict[str, Any] = {}
        for part in value:
            one = _reward(path, part, objects)
            one = one if isinstance(one, dict) else {str(one).rpartition(":")[2]: {"source": one}}
            if twice := merged.keys() & one.keys():
                fix = "name them: reward={'first': ..., 'second': ...}"
                raise NovaError(f"two rewards are named {min(twice)!r}", where="reward", fix=fix)
            merged |= one
        return merged
    if isinstance(value, Mapping):
        return {str(name): _one_reward(f"reward.{name}", part, objects) for name, part in value.items()}
    _check_reward(path, value)
    return value


def _one_reward(path: str, value: Any, objects: dict[str, Any]) -> Any:
    if callable(value):
        return {"source": _named(path, value, objects)}
    if isinstance(value, Mapping):
        return {
            str(name): _named(path, part, objects) if name == "source" and callable(part) else part
            for name, part in value.items()
        }
    _check_reward(path, value)
    return {"source": value} if isinstance(value, str) else value


def _check_reward(path: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        what = f"must be a function, a name or a mapping, got {value!r:.60}"
        raise NovaError(what, where=path, fix="pass a function, 'file.py:name' or {'name': function}")


def _named(path: str, value: Any, objects: dict[str, Any], *, name: str | None = None) -> str:
    objects[path] = value
    return PREFIX + (name or _name(value))


def _name(value: Callable[..., Any] | Any) -> str:
    return str(getattr(value, "__name__", None) or type(value).__name__).strip("<>")
