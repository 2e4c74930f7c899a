"""The command `novarl import SOURCE [OUT] [field=column ...]`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from novarl.core.errors import NovaError, visible
from novarl.integrations import readers
from novarl.integrations.readers.reading import Reading, some

USAGE = "novarl import SOURCE [OUT] [field=column ...]"


def run_import(words: Sequence[str]) -> None:
    """Write the run directory of a source, and print what was read, what is absent, and what was kept."""
    source, out, options = _arguments(words)
    found = readers.read(source, options)
    out = out or Path("runs") / _name(source)
    if (out / "metrics.jsonl").exists():
        fix = f"give another directory: novarl import {shlex.quote(str(source))} OUT"
        raise NovaError("the directory already holds a run", where=str(out), fix=fix)
    found.write(out, source)
    print(visible(_report(found, out)), end="")


def _arguments(words: Sequence[str]) -> tuple[Path, Path | None, dict[str, str]]:
    paths: list[str] = []
    options: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if sign and re.fullmatch("[a-z_]+", name) and not Path(word).exists():
            options[name] = value
        else:
            paths.append(word)
    if not paths or len(paths) > 2 or any(path.startswith("-") for path in paths):
        what = "gives no source" if not paths else f"does not take {paths[-1]!r}"
        raise NovaError(f"the command {what}", where="novarl import", fix=USAGE)
    source, *rest = (Path(path).expanduser() for path in paths)
    return source, rest[0] if rest else None, options


def _name(source: Path) -> str:
    """The name of the source; of its directory if that says more."""
    plain = source.resolve()
    name = plain.stem if plain.is_file() else plain.name
    return plain.parent.name if name in ("completions", "results", "trainer_state") and plain.parent.name else name


def _report(found: Reading, out: Path) -> str:
    lines = [("format", found.writer), *(("read", one) for one in found.read)]
    if found.renamed:
        lines.append(("renamed", some((f"{theirs} -> {ours}" for theirs, ours in found.renamed.items()), 40)))
    if found.extra:
        lines.append(("extra", f"kept under `extra` of each answer: {some(found.extra, 40)}"))
    lines += [("absent", one) for one in found.absent]
    lines += [("note", one) for one in found.notes]
    lines += [("wrote", str(out))]
    return "".join(f"{head + ':':9}{what}\n" for head, what in lines)
