"""`novarl report`: a run as one HTML file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.version import VERSION
from novarl.dashboard.runs import Library
from novarl.dashboard.samples import Filter, evenly
from novarl.dashboard.views import Book, plain

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("dom.js", "chart.js", "tokens.js", "answers.js", "facts.js", "report.js")
"""The modules of the report, each after those that it imports."""

FIRST = "<!doctype html>\n<!-- written by novarl report -->"
POINTS = 600


def write(library: Library, name: str, target: Path, steps: int, groups: int) -> int:
    """Write the report of a run to `target` and return its size in bytes. NovaError if the run cannot be read, or if
    `target` cannot be written or holds something else."""
    _check_target(target)
    text = page(contents(Book(library), name, steps, groups))
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise NovaError(f"cannot be written: {error.strerror}", where=str(target), fix="choose another --out") from None
    return len(text.encode())


def contents(book: Book, name: str, steps: int, groups: int) -> dict[str, Any]:
    """Everything that the report shows: the JSON views of `novarl watch`, with samples of `steps` steps."""
    run = book.run(name)
    series = book.series(name)
    while series.update():
        pass
    run = book.run(name)
    samples = book.samples(name)
    logged = samples.steps()
    chosen = evenly(logged, steps)
    return {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": VERSION,
        "run": run,
        "curves": {phase: book.curves(name, (), phase, POINTS) for phase in run["phases"]},
        "stages": book.stages(name),
        "alerts": book.alerts((name,)),
        "config": book.config((name,)),
        "steps_logged": len(logged),
        "samples": [_sample(samples, step, groups) for step in chosen],
    }


def _sample(samples: Any, step: int, groups: int) -> dict[str, Any]:
    """The first groups of a step, or why it cannot be read."""
    try:
        listed = samples.groups(step, Filter(), 0, max(1, groups))
        shown = [samples.group(step, line["group"], Filter()) for line in listed["groups"][:groups]]
    except NovaError as error:
        return {"step": step, "error": str(error), "groups": []}
    return {"step": step, "groups_total": listed["groups_total"], "groups": shown}


def page(data: dict[str, Any]) -> str:
    """The HTML of a report. Nothing in `data` is markup: it is a block of JSON that scripts turn into text nodes."""
    block = json.dumps(plain(data), allow_nan=False, default=str, separators=(",", ":")).replace("<", "\\u003c")
    plot, script = _static("vendor/uPlot.iife.min.js"), bundle()
    style = "\n".join(_static(name) for name in ("vendor/uPlot.min.css", "style.css"))
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (plot, script)
    )
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; base-uri 'none'; form-action 'none'"
    return f"""{FIRST}
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark">
<title>NovaRL report</title>
<style>{style}</style>
<body class="report"><main id="main"><noscript>This report draws itself with JavaScript.</noscript></main>
<script type="application/json" id="data">{block}</script>
<script>{plot}</script>
<script>{script}</script>
</body>
</html>
"""


def bundle() -> str:
    """The modules of the report as one script: their imports and the word `export` are left out, so no name may be
    defined in two modules."""
    parts = []
    for name in SCRIPTS:
        text = re.sub(r"^import [^;]*;\n", "", _static(name), flags=re.MULTILINE)
        parts.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return "(() => {\n'use strict';\n" + "\n".join(parts) + "})();"


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _check_target(target: Path) -> None:
    """Only an earlier report is replaced."""
    if target.is_dir():
        raise NovaError("is a directory", where=str(target), fix="give a file: --out FILE")
    if target.exists():
        with target.open("rb") as file:
            first = file.read(len(FIRST))
        if first != FIRST.encode():
            raise NovaError("exists, and is not a report", where=str(target), fix="choose another --out")
