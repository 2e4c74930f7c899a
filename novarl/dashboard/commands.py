"""The commands `novarl watch` and `novarl report`."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from novarl.core.errors import NovaError
from novarl.dashboard.runs import Library, check_places

PORT = 8765


class Parser(argparse.ArgumentParser):
    """Mistakes are NovaErrors, as in every other command."""

    def error(self, message: str) -> NoReturn:
        raise NovaError(message, where="command line", fix=f"see {self.prog} --help")


def main(command: str, words: Sequence[str], meaning: str = "", examples: str = "") -> int:
    """Run `watch` or `report`; returns the exit code. `meaning` and `examples` are for the help. NovaError for
    mistakes."""
    parser = watch_parser() if command == "watch" else report_parser()
    parser.description, parser.epilog = f"{meaning}\n\n{parser.description}", examples
    try:
        given = parser.parse_args(words)
    except SystemExit as done:  # --help
        return int(done.code or 0)
    if command == "watch":
        watch(given.runs or ["runs"], given.port, given.open)
    else:
        report(given.run, given.out, given.steps, given.groups)
    return 0


def watch_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="novarl watch",
        description="It serves this machine only, until Ctrl-C.\nNeeds the extra: pip install 'novarl[dashboard]'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run directories, or directories of runs (default: runs)"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"port on 127.0.0.1 (default {PORT}; 0: any free one)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    return parser


def report_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="novarl report",
        description="It has curves, alerts, configuration and samples, and needs no network.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--out", metavar="FILE", help="the file to write (default: NAME-report.html, NAME of the run)")
    parser.add_argument("--steps", type=int, default=3, help="steps with samples, evenly spaced (default 3)")
    parser.add_argument("--groups", type=int, default=4, help="groups of each of these steps (default 4)")
    return parser


def watch(names: Sequence[str], port: int, show: bool) -> None:
    """Serve the page until Ctrl-C. NovaError if a directory is missing or the port is taken."""
    places = check_places(names)
    if not 0 <= port <= 65535:
        raise NovaError(f"must be 0 to 65535, got {port}", where="--port")
    try:
        import uvicorn

        from novarl.dashboard.server import application
    except ImportError as error:
        fix = "pip install 'novarl[dashboard]'"
        raise NovaError(f"novarl watch needs {error.name}, which is not installed", fix=fix) from None
    from novarl.dashboard.views import Book

    with _listening(port) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        book = Book(Library(places))
        count = len(book.library.runs)
        print(f"{count} run{'s' * (count != 1)} in {', '.join(names)}: {address}   (Ctrl-C ends it)", flush=True)
        for note in book.library.refused:
            print(f"not shown: {note}", file=sys.stderr)
        if show:
            import webbrowser

            webbrowser.open(address)
        settings: dict[str, Any] = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 3}
        server: uvicorn.Server | None = None
        config = uvicorn.Config(application(book, lambda: server is not None and server.should_exit), **settings)
        server = uvicorn.Server(config)
        server.run(sockets=[listener])


def _listening(port: int) -> socket.socket:
    """A socket on 127.0.0.1. NovaError if the port is taken or not permitted."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError as error:
        listener.close()
        what = "is in use by another program" if error.errno == 98 else f"cannot be used: {error.strerror}"
        raise NovaError(
            f"port {port} {what}", where="--port", fix="choose another, or --port 0 for any free one"
        ) from None
    return listener


def report(name: str, out: str | None, steps: int, groups: int) -> None:
    """Write the report of a run and print its path. NovaError if there is no run or the file cannot be written."""
    from novarl.dashboard.report import write

    (place,) = check_places([name])
    library = Library([place])
    library.refresh()
    if len(library.runs) != 1:
        found = ", ".join(sorted(library.runs)[:5])
        what = f"contains {len(library.runs)} runs: {found}" if found else "the directory contains no run"
        raise NovaError(what, where=name, fix="give one run directory, such as runs/latest")
    for option, value in (("--steps", steps), ("--groups", groups)):
        if value < 0:
            raise NovaError(f"must be at least 0, got {value}", where=option)
    (run,) = library.runs.values()
    target = Path(out) if out else Path(f"{run.path.name}-report.html")
    size = write(library, run.name, target, steps, groups)
    print(f"{target} ({size / 1e6:.1f} MB)")
