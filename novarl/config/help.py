"""The keys of a command for `--help`: every key with a one-line meaning, or one section with the full descriptions."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator

from novarl.config.base import Config
from novarl.config.keys import Key, keys, nearest, sections, value_text
from novarl.core.errors import NovaError

WIDTH, COLUMN = 80, 26


def key_lines(tree: type[Config]) -> str:
    """All keys of a command, grouped by section."""
    found = keys(tree)
    lines = ["keys (default in brackets):"]
    for key in found.values():
        if "." not in key.path:
            lines += _entry(key, _first_sentence(key.meaning))
    for section in sorted(sections(tree)):
        inner = [key for key in found.values() if key.path.startswith(f"{section}.")]
        title = f"{section}: {_first_sentence(inspect.getdoc(inner[0].tree) or '')}"
        lines += ["", *textwrap.wrap(title, WIDTH, subsequent_indent="  ")]
        lines += [line for key in inner for line in _entry(key, _first_sentence(key.meaning))]
    return "\n".join(lines) + "\n"


def section_lines(tree: type[Config], name: str) -> str:
    """One section, or one key, with the full description of every key. NovaError for an unknown name."""
    found = [key for key in keys(tree).values() if key.path == name or key.path.startswith(f"{name}.")]
    if not found:
        near = nearest(name, [*keys(tree), *sections(tree)])
        fix = f"did you mean {near}?" if near else f"the sections are {', '.join(sorted(sections(tree)))}"
        raise NovaError(f"no key or section is called {name[:60]!r}", where="--help", fix=fix)
    about = inspect.getdoc(found[0].tree) if name in sections(tree) else None
    lines = [*textwrap.wrap(f"{name}: {' '.join(about.split())}", WIDTH), ""] if about else []
    for key in found:
        lines += _entry(key, f"{key.meaning} Takes: {key.values}.")
    return "\n".join(lines) + "\n"


def _entry(key: Key, meaning: str) -> Iterator[str]:
    """One key: its name, its meaning beside it, and the default at the end."""
    default = "[required]" if key.required else "" if key.default in (None, (), {}) else f"[{value_text(key.default)}]"
    text = f"{meaning.replace('`', '')} {default}".strip()
    wrapper = textwrap.TextWrapper(WIDTH - COLUMN, break_long_words=False, break_on_hyphens=False)
    wrapped = wrapper.wrap(text)
    name = f"  {key.path}"
    if len(name) >= COLUMN - 1:
        yield name
    else:
        yield f"{name:<{COLUMN}}{wrapped.pop(0)}"
    yield from (" " * COLUMN + line for line in wrapped)


def _first_sentence(text: str) -> str:
    """
    >>> _first_sentence("Learning rate. The default depends on the model."), _first_sentence("Columns, e.g. a")
    ('Learning rate.', 'Columns, e.g. a')
    """
    head, end, _ = " ".join(text.split()).replace("e.g. ", "e.g.\0").partition(". ")
    return (head + end.strip()).replace("\0", " ")
