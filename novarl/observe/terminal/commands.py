"""`novarl runs`, `show`, `compare` and `alerts`: they read run directories, print, and change nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from novarl.core.errors import NovaError
from novarl.observe import evaluations
from novarl.observe.listing import find_runs, overview
from novarl.observe.run import load_run
from novarl.observe.terminal import comparison_page, run_page
from novarl.observe.terminal.comparison_page import LETTERS, render_comparison
from novarl.observe.terminal.listing_page import as_json, render_runs
from novarl.observe.terminal.run_page import render_alerts, render_run

Defaults = Callable[[str], Mapping[str, Any] | None]
"""The default of every setting of a kind of run, by dotted key; None for an unknown kind."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NovaError(message, where="command line", fix=f"see {self.prog} --help")


def parser_of(command: str, meaning: str, examples: str) -> argparse.ArgumentParser:
    """The arguments of a command."""
    parser = _Parser(
        prog=f"novarl {command}",
        description=meaning,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if command == "runs":
        parser.add_argument("dir", nargs="?", default="runs", help="directory to search (default: runs)")
    elif command == "compare":
        parser.add_argument(
            "runs",
            nargs="+",
            metavar="RUN",
            help="run directories, or several of one side joined by commas; runs that differ only in their seed are "
            "one side; with a single run, its first evaluation is compared with its last",
        )
        parser.add_argument("--step", type=int, help="the evaluation after this step (default: the last one)")
        parser.add_argument("--samples", action="store_true", help="the mean of eval.k samples, not the greedy answer")
        parser.add_argument(
            "--detect", type=float, metavar="D", help="plan for a difference of D (default: the observed)"
        )
    else:
        parser.add_argument("run", metavar="RUN", help="a run directory, such as runs/latest")
    if command == "show":
        parser.add_argument("--all", action="store_true", help="every metric, also without a healthy range")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def view(parser: argparse.ArgumentParser, command: str, words: Sequence[str], defaults: Defaults) -> str:
    """What the command prints. NovaError for wrong arguments and for directories that cannot be read."""
    asked = parser.parse_args(list(words))
    pages = {"runs": _runs, "show": _show, "compare": _compare, "alerts": _alerts}
    return pages[command](asked, defaults)


def _runs(asked: argparse.Namespace, defaults: Defaults) -> str:
    folder = Path(asked.dir).expanduser()
    if not folder.is_dir():
        raise NovaError("no such directory", where=asked.dir, fix="give the directory that holds the runs")
    found = sorted((overview(path) for path in find_runs(folder)), key=lambda run: -(run.began or 0.0))
    if asked.json:
        return _json([as_json(run) for run in found])
    if not found:
        raise NovaError("contains no runs", where=asked.dir, fix="give the directory that holds the runs")
    return render_runs(found, folder)


def _show(asked: argparse.Namespace, defaults: Defaults) -> str:
    found, seen = _facts(asked.run, defaults)
    return _json(found) if asked.json else render_run(found, seen, every=asked.all)


def _alerts(asked: argparse.Namespace, defaults: Defaults) -> str:
    found, _ = _facts(asked.run, defaults)
    return _json({name: found[name] for name in ("findings", "alerts")}) if asked.json else render_alerts(found)


def _facts(name: str, defaults: Defaults) -> tuple[dict[str, Any], Any]:
    run = load_run(name)
    seen = overview(run.path)
    if seen.problem:
        raise NovaError(seen.problem)
    return run_page.facts(run, seen, None if "writer" in run.manifest else defaults(str(seen.kind))), seen


def _compare(asked: argparse.Namespace, defaults: Defaults) -> str:
    groups = [[load_run(name) for name in word.split(",") if name] for word in asked.runs]
    if any(not group for group in groups):
        raise NovaError("an argument names no run", where="compare", fix="give run directories, separated by blanks")
    if asked.detect is not None and not asked.detect > 0:
        raise NovaError("--detect must be above 0", where="compare", fix="give the difference to plan for")
    sides = _before_and_after(groups[0], asked.step) if len(groups) == 1 else evaluations.sides_of(groups)
    if len(sides) > len(LETTERS):
        raise NovaError(f"{len(sides)} sides", where="compare", fix=f"compare at most {len(LETTERS)}")
    paired = evaluations.paired(sides, step=asked.step, use_samples=asked.samples)
    found = comparison_page.facts(sides, paired, effect=asked.detect, use_samples=asked.samples)
    return _json(found) if asked.json else render_comparison(found)


def _before_and_after(group: list[Any], step: int | None) -> list[evaluations.Side]:
    """The first and last evaluation of the same runs."""
    steps = evaluations.evaluated_steps(group[0].path)
    if len(steps) < 2 or step is not None:
        raise NovaError("one side only", where="compare", fix="give two runs, or one with evaluations after two steps")
    settings = evaluations.flat(group[0])
    return [evaluations.Side(tuple(group), settings, at) for at in (steps[0], steps[-1])]


def _json(value: Any) -> str:
    return json.dumps(_strict(value), indent=2, ensure_ascii=False, default=str) + "\n"


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are text."""
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list | tuple) else value


def show(text: str) -> None:
    """Print a page; characters that the terminal's encoding lacks are replaced."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
