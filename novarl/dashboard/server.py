"""The page and its JSON over HTTP, on 127.0.0.1 only.

A path of a URL never reaches the file system: static files are read once, at the start, and a run is looked up by its
name among the runs that were found. Requests whose Host is not this machine are refused, so that a foreign page cannot
read the answers by pointing its own name at 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from novarl.core.errors import NovaError
from novarl.dashboard.prometheus import exposition
from novarl.dashboard.samples import TOKENS, Filter
from novarl.dashboard.views import Book, plain, stamp

STATIC = Path(__file__).parent / "static"
HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
POLL = 0.25
"""Seconds between two looks at the files."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def application(book: Book, ending: Callable[[], bool] = lambda: False) -> Starlette:
    """The ASGI application. Once `ending()` is true, the open streams end, so that the server can."""
    changes = Changes(book, ending)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(changes.watch())
        yield
        watching.cancel()

    views: dict[str, Callable[[Request], Any]] = {
        "/health": lambda request: {"status": "ok", "runs": len(book.library.runs)},
        "/alerts": lambda request: book.alerts(request.query_params.getlist("run")),
        "/api/alerts": lambda request: book.alerts(request.query_params.getlist("run")),
        "/api/runs": lambda request: book.runs(),
        "/api/run": lambda request: book.run(_run(request)),
        "/api/curves": lambda request: book.curves(
            _run(request),
            request.query_params.getlist("metric"),
            request.query_params.get("phase", ""),
            min(20_000, max(10, _number(request, "points", 800))),
        ),
        "/api/stages": lambda request: book.stages(_run(request)),
        "/api/config": lambda request: book.config(request.query_params.getlist("run")),
        "/api/steps": lambda request: {
            "run": _run(request),
            "steps": ranges(book.samples(_run(request)).steps()),
        },
        "/api/groups": lambda request: book.samples(_run(request)).groups(
            _number(request, "step"),
            _filter(request),
            max(0, _number(request, "page", 0)),
            min(200, max(1, _number(request, "per", 50))),
        ),
        "/api/group": lambda request: book.samples(_run(request)).group(
            _number(request, "step"), _number(request, "group"), _filter(request), _number(request, "tokens", TOKENS)
        ),
        "/api/prompt": lambda request: book.samples(_run(request)).across(request.query_params.get("key", "")),
        "/api/find": lambda request: book.samples(_run(request)).find(
            _filter(request), _number(request, "after"), request.query_params.get("backwards") == "1"
        ),
    }
    routes = [Route(path, _json(view)) for path, view in views.items()]
    routes += [
        Route("/metrics", lambda request: _metrics(book)),
        Route("/api/events", changes.stream),
        *(Route(path, _asset(content, kind)) for path, (content, kind) in assets().items()),
    ]
    handlers: dict[Any, Any] = {404: _missing, NovaError: _refused, OSError: _vanished}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.add_middleware(LocalOnly)
    return app


class LocalOnly:
    """Refuses foreign Host headers, and sets the security headers of every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
        host, _, port = given.rpartition(":") if not given.endswith("]") and ":" in given else (given, "", "")

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        if host.lower() in HOSTS and (port.isdecimal() or not port):
            await self.app(scope, receive, guarded)
        else:
            said = f"This page is served for this machine only, and the request named the host {given[:80]!r}.\n"
            await PlainTextResponse(said, 421)(scope, receive, guarded)


class Changes:
    """Tells every open page which runs were written to. Also reads large metric files that a page asked for."""

    def __init__(self, book: Book, ending: Callable[[], bool]) -> None:
        self._book, self._ending = book, ending
        self._pages: set[asyncio.Queue[str | None]] = set()
        self._stamps: dict[str, object] = {}

    async def watch(self) -> None:
        """Look at the files again and again, until the end."""
        asyncio.get_running_loop().run_in_executor(None, importlib.import_module, "pyarrow.json")  # takes a moment
        while not self._ending():
            listed, changed = await run_in_threadpool(self._look)
            if listed or changed:
                self._tell(json.dumps({"listed": listed, "runs": changed}))
            await asyncio.sleep(0.01 if self._book.unread() else POLL)
        for page in self._pages:
            page.put_nowait(None)

    async def stream(self, request: Request) -> Response:
        """Server-sent events: `{"listed": whether the list of runs changed, "runs": the runs written to}`."""
        page: asyncio.Queue[str | None] = asyncio.Queue()

        async def lines() -> AsyncIterator[str]:
            self._pages.add(page)
            try:
                yield "retry: 1000\n\n"
                while (said := await _next(page)) is not None:
                    yield f"data: {said}\n\n" if said else ": still here\n\n"
            finally:
                self._pages.discard(page)

        return StreamingResponse(lines(), media_type="text/event-stream")

    def _tell(self, said: str) -> None:
        for page in self._pages:
            page.put_nowait(said)

    def _look(self) -> tuple[bool, list[str]]:
        listed = self._book.library.refresh()
        stamps: dict[str, object] = {name: stamp(run) for name, run in list(self._book.library.runs.items())}
        changed = {name for name, state in stamps.items() if self._stamps.get(name) != state}
        self._stamps = stamps
        for name in self._book.unread():
            series = self._book.series(name)
            with contextlib.suppress(NovaError, OSError):  # told where the run is asked for
                series.update(0.2)
            if series.progress == 1.0:
                changed.add(name)
        return listed, sorted(changed)


async def _next(page: asyncio.Queue[str | None]) -> str | None:
    """The next message, or an empty one after a while, which shows whether the page is still there."""
    try:
        return await asyncio.wait_for(page.get(), 15.0)
    except TimeoutError:
        return ""


def assets() -> Mapping[str, tuple[bytes, str]]:
    """The files of the page by URL, with their types."""
    files = [path for path in sorted(STATIC.rglob("*")) if path.is_file()]
    found = {f"/static/{path.relative_to(STATIC).as_posix()}": _read(path) for path in files}
    return {"/": found["/static/index.html"], **found}


def ranges(steps: list[int]) -> list[list[int]]:
    """Increasing numbers as [first, last, distance]: a run of a hundred thousand steps is one entry."""
    found: list[list[int]] = []
    for step in steps:
        if found and found[-1][0] == found[-1][1]:
            found[-1] = [found[-1][0], step, step - found[-1][0]]
        elif found and step - found[-1][1] == found[-1][2]:
            found[-1][1] = step
        else:
            found.append([step, step, 1])
    return found


def _read(path: Path) -> tuple[bytes, str]:
    kind = "text/javascript" if path.suffix == ".js" else mimetypes.guess_type(path.name)[0] or "text/plain"
    return path.read_bytes(), kind


def _json(view: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return await run_in_threadpool(lambda: _encoded(view(request)))

    return answer


def _encoded(value: Any, status: int = 200) -> Response:
    # A lone surrogate, legal in JSON, is escaped.
    text = json.dumps(plain(value), allow_nan=False, default=str, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


def _asset(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


def _metrics(book: Book) -> Response:
    text = exposition(book.runs()["runs"])
    return Response(text.encode(errors="backslashreplace"), media_type="text/plain; version=0.0.4")


async def _missing(request: Request, error: Exception) -> Response:
    return _encoded({"error": "no such page; the views are listed in docs/dashboard.md"}, 404)


async def _refused(request: Request, error: Exception) -> Response:
    return _encoded({"error": str(error)}, 400)


async def _vanished(request: Request, error: Exception) -> Response:
    return _encoded({"error": f"a file of the run cannot be read: {error}"}, 400)


def _run(request: Request) -> str:
    if not (name := request.query_params.get("run")):
        raise NovaError("is required", where="run", fix="see /api/runs")
    return name


def _number(request: Request, name: str, default: int | None = None) -> int:
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        what = "is required" if text is None else f"must be a whole number, got {text[:40]!r}"
        raise NovaError(what, where=name) from None


def _real(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise NovaError(f"must be a number, got {text[:40]!r}", where=name) from None


def _filter(request: Request) -> Filter:
    lengths = [
        None if not request.query_params.get(name) else _number(request, name) for name in ("length_min", "length_max")
    ]
    return Filter(
        text=request.query_params.get("q", ""),
        reward_min=_real(request, "reward_min"),
        reward_max=_real(request, "reward_max"),
        length_min=lengths[0],
        length_max=lengths[1],
        finish_reason=request.query_params.get("finish", ""),
        status=request.query_params.get("status", ""),
    )
