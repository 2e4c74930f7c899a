"""Removes secrets from everything that is sent to a tracker."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"

_WORDS = frozenset(
    {"token", "secret", "password", "passwd", "passphrase", "apikey", "credential", "credentials", "authorization"}
)
_COLUMNS = frozenset(
    {"prompt", "messages", "answer", "completion", "chosen", "rejected", "label", "text", "margin", "group"}
)
"""`<column>_key` names a column of the data and is no secret."""

_VALUES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|wandb_v\d_[\w-]{16,}|local-[0-9a-f]{40}|sk-[\w-]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abp]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|(?<![\w/.-])[0-9a-f]{40}(?![\w.-]))|(?<=[Bb]earer )[\w.~+/-]{8,}=*"
)
"""Hugging Face, W&B (40 hexadecimal digits), OpenAI, GitHub, GitLab, Slack and AWS."""
_IN_ADDRESS = re.compile(r"(?<=://)[^\s/@:]+:[^\s/@]+(?=@)")
_PAIR = re.compile(r"(?P<key>--?[\w.-]+|[\w.-]+)=(?P<value>\S+)")
_SHORTEST = 8


def redacted(value: Any, *, key: str = "", known: Sequence[str] | None = None) -> Any:
    """`value` without secrets: values of keys such as `api_key`, texts that look like a token, passwords in addresses,
    and the values of environment variables with such names (`known`). Numbers, true, false and null are kept.

    >>> redacted({"wandb": {"key": "x"}, "max_tokens": 5, "prompt_key": "question"}, known=())
    {'wandb': {'key': '***'}, 'max_tokens': 5, 'prompt_key': 'question'}
    """
    known = secrets_of(os.environ) if known is None else known
    if isinstance(value, Mapping):
        return {str(name): redacted(item, key=str(name), known=known) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return _words(value, known) if key == "argv" else [redacted(item, key=key, known=known) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if _is_secret(key):
        return HIDDEN
    return str(value) if key.rpartition(".")[2] == "commit" else _text(str(value), known)


def secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values of environment variables whose names say that they are secret, the longest first."""
    found = {value for name, value in environment.items() if _is_secret(name.lower()) and len(value) >= _SHORTEST}
    return tuple(sorted(found, key=len, reverse=True))


def _is_secret(key: str) -> bool:
    """
    >>> [_is_secret(key) for key in ("hf_token", "logger.wandb.key", "OPENAI_API_KEY", "max_tokens", "answer_key")]
    [True, True, True, False, False]
    """
    words = re.split(r"[^a-z0-9]+", key.lower())
    if _WORDS & set(words):
        return True
    return "key" in words and not (len(words) > 1 and words[-1] == "key" and words[-2] in _COLUMNS)


def _text(text: str, known: Sequence[str]) -> str:
    for secret in known:
        text = text.replace(secret, HIDDEN)
    return _IN_ADDRESS.sub(f"{HIDDEN}:{HIDDEN}", _VALUES.sub(HIDDEN, text))


def _words(words: Sequence[Any], known: Sequence[str]) -> list[str]:
    """A command line: `key=value` and `--key value` too."""
    shown: list[str] = []
    hide = False
    for word in map(str, words):
        pair = _PAIR.fullmatch(word)
        if hide and not word.startswith("--"):
            shown.append(HIDDEN)
        elif pair and _is_secret(pair["key"]):
            shown.append(f"{pair['key']}={HIDDEN}")
        else:
            shown.append(_text(word, known))
        hide = word.startswith("--") and "=" not in word and _is_secret(word)
    return shown
