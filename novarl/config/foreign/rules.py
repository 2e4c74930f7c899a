"""Translations of values that the tables refer to by name: `save_steps -> save_every = 5 @never_at_minus_one`."""

from __future__ import annotations

from typing import Any


def same(value: Any) -> Any:
    """An implied key gets the same value."""
    return value


def off_at_zero(value: Any) -> Any:
    """0 means off, which is null."""
    return None if value == 0 and not isinstance(value, bool) else value


def never_at_minus_one(value: Any) -> Any:
    """-1 means never, which is null."""
    return None if value == -1 else value


def split_last(value: Any) -> Any:
    """RL2's `SPLIT@NAME` of a published dataset is `NAME@SPLIT`."""
    split, at, name = str(value).partition("@")
    return f"{name}@{split}" if at and "/" in name and "/" not in split and not name.startswith("/") else value


def lagrangian(value: Any) -> Any:
    """RL2's `use_lagrangian` as a mode."""
    return ("lagrangian" if value else "penalty") if isinstance(value, bool) else value


def last_checkpoint(value: Any) -> Any:
    """true, also as text from a command line, means the latest checkpoint of the directory."""
    return {"true": "auto", "false": None}.get(str(value).lower(), value)


def only_element(value: Any) -> Any:
    """A list of one value is that value."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def separated(value: Any) -> Any:
    """`q_proj,v_proj` is a list; `all-linear` is one word."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) and value != "all-linear" else value


def reported(value: Any) -> Any:
    """TRL's `report_to` without TensorBoard, which is no tracker here."""
    named = value.split(",") if isinstance(value, str) else value
    if not isinstance(named, list | tuple):
        return value
    return [name for name in (str(item).strip() for item in named) if name not in ("none", "tensorboard")]


def reported_to_tensorboard(value: Any) -> bool:
    """`none` and an empty list turn TensorBoard off."""
    return value not in ("none", [], ["none"])
