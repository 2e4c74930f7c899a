"""Reads the tables of other libraries' names, the text files of this folder.

    [TRL]                                         the library; `several` for names that many share
    num_generations -> responses_per_prompt = 4   an alias, with an example value
    beta -> kl.coef = 0.04                        details of an alias are indented:
        also: kl.type=loss                        set too, unless given (@same: to the same value)
    save_steps -> save_every = 5 @rule            a function of `rules` translates the value
    use_vllm (rl) = false: why                    accepted only at these values, by these commands
    ignored: why                                  accepted and ignored; the names follow, indented
        logging_steps logging_strategy
    ignored (rl) with steps: why => the fix       ignored only if that key is given
    refused (rl): why => the fix                  refused; the names follow, indented

Several names are separated by spaces, `{actor,critic}.tp_size` stands for two, values are JSON or plain text, and
without commands a row is for every kind of training (an alias for all that have its key). Order is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from novarl.config.foreign import rules
from novarl.config.foreign.rows import TRAINING, Alias, Fixed, Hint, Ignored, Row

FILES = ("others", "rl2", "trl", "openrlhf", "verl")
_HEAD = re.compile(r"(?P<names>[^(=:]+?)(?: \((?P<commands>[a-z ]+)\))?(?: with (?P<beside>\S+))?(?P<sign> ->| =|:) ")
_BRACES = re.compile(r"(.*)\{([^}]*)\}(.*)")


@cache
def rows() -> tuple[Row, ...]:
    """Every row of every table. They are read when a name is first looked up."""
    return tuple(row for name in FILES for row in _read(Path(__file__).with_name(f"{name}.txt")))


def _read(path: Path) -> Iterator[Row]:
    source = ""
    for head, *inner in _blocks(path.read_text(encoding="utf-8")):
        if head.startswith("["):
            source = head[1:-1]
        else:
            yield from _rows(source, head, inner)


def _blocks(text: str) -> Iterator[list[str]]:
    """Each line with the indented lines below it."""
    block: list[str] = []
    for line in text.splitlines():
        if line.startswith(" "):
            block.append(line.strip())
        elif line and not line.startswith("#"):
            if block:
                yield block
            block = [line]
    yield block


def _rows(source: str, head: str, inner: list[str]) -> Iterator[Row]:
    found = _HEAD.match(head)
    assert found, head
    rest, commands = head[found.end() :], tuple((found["commands"] or "").split())
    if found["sign"] == " ->":
        yield from _aliases(source, _names(found["names"]), commands, rest, inner)
        return
    every = commands or TRAINING
    if found["sign"] == " =":
        values, _, reason = rest.partition(": ")
        for old in _names(found["names"]):
            yield Fixed(old, tuple(map(_value, values.split())), source, reason, every)
        return
    what, _, fix = rest.partition(" => ")
    for old in _names(" ".join(inner)):
        if found["names"] == "refused":
            yield Hint(old, what, fix, source, every)
        else:
            yield Ignored(old, what, source, every, found["beside"] or "", fix)


def _aliases(source: str, olds: list[str], commands: tuple[str, ...], rest: str, inner: list[str]) -> Iterator[Alias]:
    new, _, value = rest.partition(" = ")
    example, _, rule = value.partition(" @")
    details: dict[str, Any] = {}
    for line in inner:
        word, _, text = line.partition(": ")
        if word == "instead":
            given, _, said = text.partition(": ")
            what, _, fix = said.partition(" => ")
            details.setdefault("elsewhere", {})[given] = (what, fix)
        elif word == "unset":
            details[word] = tuple(map(_value, text.split()))
        elif word in ("values", "also", "needs"):
            details["implies" if word == "also" else word] = {
                _value(left): tuple(map(_value, right.split("|"))) if word == "needs" else _value(right)
                for left, right in (pair.split("=") for pair in text.split())
            }
        else:
            details[word] = text
    if rule and rule != "each":
        details["convert"] = getattr(rules, rule)
    for old in olds:
        yield Alias(old, tuple(new.split()), source, _value(example), each=rule == "each", commands=commands, **details)


def _names(text: str) -> list[str]:
    """
    >>> _names("lr {actor,critic}.tp_size")
    ['lr', 'actor.tp_size', 'critic.tp_size']
    """
    return [name for word in text.split() for name in _spread(word)]


def _spread(word: str) -> list[str]:
    found = _BRACES.fullmatch(word)
    if found is None:
        return [word]
    # The last braces are spread first, so that the first ones change slowest.
    ends = [f"{part}{found[3]}" for part in found[2].split(",")]
    return [f"{start}{end}" for start in _spread(found[1]) for end in ends] if found[1] else ends


def _value(text: str) -> Any:
    if text.startswith("@"):
        return getattr(rules, text[1:])
    try:
        return json.loads(text)
    except ValueError:
        return text
