"""A run's chat template: the template, its extra arguments, and the tokens that end a turn."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from novarl.config.base import Config
from novarl.core.errors import NovaError
from novarl.data.template import dated, stop_tokens, writes_date
from novarl.models.load import Policy

DATE = "chat_template_date"
"""The configuration key of the template's date, also used in a checkpoint's facts."""


def with_chat(policy: Policy, config: Config, state: Mapping[str, Any] | None = None) -> Policy:
    """`policy` with the chat template of the configuration. The tokens that end an assistant turn in it also end
    completions. A template that writes the date gets the configuration's, otherwise that of the checkpoint `state`,
    otherwise today's."""
    tokenizer = policy.tokenizer
    if config.chat_template is not None:
        tokenizer.chat_template = _template(config.chat_template)
    if not config.apply_chat_template:
        return policy
    kwargs = dict(config.chat_template_kwargs)
    if config.tools is not None:
        kwargs["tools"] = _tools(config.tools)
    asked = None if config.chat_template_date is None else _day(config.chat_template_date)
    day = None
    if isinstance(tokenizer.chat_template, str) and writes_date(tokenizer.chat_template):
        saved = (state or {}).get("facts", {}).get(DATE)
        day = asked or _day(saved or datetime.date.today().isoformat())
        kwargs["chat_template"] = dated(tokenizer.chat_template, day)
    elif asked is not None:
        raise NovaError("the chat template does not write a date", where=DATE, fix="remove it")
    ends = (*policy.eos_ids, *stop_tokens(tokenizer, kwargs))
    return replace(
        policy,
        eos_ids=tuple(dict.fromkeys(ends)),
        template_kwargs=kwargs,
        template_date=None if day is None else day.isoformat(),
    )


def date_notes(policy: Policy, config: Config, state: Mapping[str, Any] | None = None) -> list[str]:
    """Notes for a run whose chat template writes the date."""
    day = policy.template_date
    if day is None or config.chat_template_date is not None:
        return []
    if state is None:
        return [f"The chat template writes today's date. Set {DATE}={day} to reproduce this run on another day"]
    today = datetime.date.today().isoformat()
    if day == today:
        return []
    return [f"The chat template writes the date. The resumed run keeps its original date, {day}"]


def date_facts(policy: Policy) -> dict[str, str]:
    """The date as a fact for checkpoints."""
    return {} if policy.template_date is None else {DATE: policy.template_date}


def _day(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise NovaError(f"not a valid date: {text}", where=DATE, fix="write YYYY-MM-DD") from error


def _template(given: str) -> str:
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        fix = "give a Jinja file or the template itself"
        raise NovaError(f"cannot be read: {error}", where=f"chat_template={given}", fix=fix) from error


def _tools(given: str | tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    if not isinstance(given, str):
        return list(given)
    place, fix = f"tools={given:.80}", "give a JSON file with a list of tool schemas, or the list itself"
    try:
        text = given if given.lstrip().startswith("[") else Path(given).expanduser().read_text("utf-8")
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise NovaError(f"cannot be read: {error}", where=place, fix=fix) from error
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise NovaError("must be a list of objects", where=place, fix=fix)
    return found
