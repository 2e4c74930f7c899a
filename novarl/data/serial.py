"""Exact conversion of prompts, rollouts and scored rollouts to JSON and back, for checkpoints.

Floats are exact because JSON writes the shortest text that reads back as the same float. Tuples inside answers, extra
columns and info become `{"__tuple__": [...]}`, and dicts with non-string keys `{"__items__": [...]}`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.types import Prompt, Rollout, Scored, Sequence

_TUPLE, _ITEMS = "__tuple__", "__items__"


def scored_to_dict(scored: Scored) -> dict[str, Any]:
    """`scored` as JSON values. Raises NovaError if its prompt or info holds tensors or other objects."""
    return {
        "rollout": rollout_to_dict(scored.rollout),
        "rewards": _to_json(scored.rewards, "rewards"),
        "reward": scored.reward,
        "error": scored.error,
        "token_rewards": None if scored.token_rewards is None else list(scored.token_rewards),
        **{name: _to_json(logged, name) for name in ("extra", "metrics") if (logged := getattr(scored, name))},
    }


def scored_from_dict(state: Mapping[str, Any]) -> Scored:
    """The inverse of `scored_to_dict`."""
    tokens = state["token_rewards"]
    return Scored(
        rollout=rollout_from_dict(state["rollout"]),
        rewards=_from_json(state["rewards"]),
        reward=state["reward"],
        error=state["error"],
        token_rewards=None if tokens is None else tuple(tokens),
        extra=_from_json(state.get("extra", {})),
        metrics=_from_json(state.get("metrics", {})),
    )


def rollout_to_dict(rollout: Rollout) -> dict[str, Any]:
    """`rollout` as JSON values."""
    return {
        "prompt": prompt_to_dict(rollout.prompt),
        "group": rollout.group,
        "index": rollout.index,
        "sequences": [_sequence_to_dict(sequence) for sequence in rollout.sequences],
        "messages": [_to_json(message, "messages") for message in rollout.messages],
        "text": rollout.text,
        "status": rollout.status,
        "finish_reason": rollout.finish_reason,
        "role": rollout.role,
        "info": _to_json(rollout.info, "info"),
    }


def rollout_from_dict(state: Mapping[str, Any]) -> Rollout:
    """The inverse of `rollout_to_dict`."""
    return Rollout(
        prompt=prompt_from_dict(state["prompt"]),
        group=state["group"],
        index=state["index"],
        sequences=tuple(_sequence_from_dict(sequence) for sequence in state["sequences"]),
        messages=tuple(_from_json(message) for message in state["messages"]),
        text=state["text"],
        status=state["status"],
        finish_reason=state["finish_reason"],
        role=state["role"],
        info=_from_json(state["info"]),
    )


def prompt_to_dict(prompt: Prompt) -> dict[str, Any]:
    """`prompt` as JSON values."""
    return {
        "id": prompt.id,
        "tokens": list(prompt.tokens),
        "messages": [_to_json(message, "messages") for message in prompt.messages],
        "answer": _to_json(prompt.answer, "answer"),
        "extra": _to_json(prompt.extra, "extra"),
        **({"template_kwargs": _to_json(prompt.template_kwargs, "template_kwargs")} if prompt.template_kwargs else {}),
    }


def prompt_from_dict(state: Mapping[str, Any]) -> Prompt:
    """The inverse of `prompt_to_dict`."""
    return Prompt(
        id=state["id"],
        tokens=tuple(state["tokens"]),
        messages=tuple(_from_json(message) for message in state["messages"]),
        answer=_from_json(state["answer"]),
        extra=_from_json(state["extra"]),
        template_kwargs=_from_json(state.get("template_kwargs", {})),
    )


def _sequence_to_dict(sequence: Sequence) -> dict[str, Any]:
    state: dict[str, Any] = {
        "tokens": list(sequence.tokens),
        "mask": list(sequence.mask),
        "behavior_logp": list(sequence.behavior_logp),
        "kept_logmass": list(sequence.kept_logmass),
        "versions": list(sequence.versions),
    }
    if sequence.support is not None:
        state["support"] = [b64encode(words).decode() for words in sequence.support]
    return state


def _sequence_from_dict(state: Mapping[str, Any]) -> Sequence:
    support = state.get("support")
    return Sequence(
        tokens=tuple(state["tokens"]),
        mask=tuple(state["mask"]),
        behavior_logp=tuple(state["behavior_logp"]),
        kept_logmass=tuple(state["kept_logmass"]),
        versions=tuple(state["versions"]),
        support=None if support is None else tuple(b64decode(words) for words in support),
    )


def _to_json(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in (_TUPLE, _ITEMS) for key in value):
            return {key: _to_json(item, f"{where}.{key}") for key, item in value.items()}
        return {_ITEMS: [[_to_json(key, where), _to_json(item, f"{where}.{key}")] for key, item in value.items()]}
    what = f"a {type(value).__name__} in a rollout cannot be saved with the run"
    raise NovaError(what, where=where, fix="use only numbers, strings, lists, tuples and dicts")


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(_from_json(item) for item in value[_TUPLE])
        if value.keys() == {_ITEMS}:
            return {_from_json(key): _from_json(item) for key, item in value[_ITEMS]}
        return {key: _from_json(item) for key, item in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value
