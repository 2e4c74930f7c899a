"""A real `novarl watch` and a real browser. The system's Chromium is used; `make test-web` installs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.web.data import hostile_run, learning_run

ROOT = Path(__file__).resolve().parents[2]
expect.set_options(timeout=30_000)  # a busy machine is slow; a test of a fault waits no longer than this
WHERE = os.environ.get("NOVARL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Served:
    """A folder of runs and the address of the page that shows it."""

    folder: Path
    address: str


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    assert WHERE, "no Chromium: make test-web installs it, or set NOVARL_CHROMIUM"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=WHERE, args=["--no-sandbox"])  # CI runs as root
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("grpo-a", "grpo-b")):
        learning_run(folder / name, seed=seed).close()
    hostile_run(folder / "hostile")
    with serving(folder) as started:
        yield started


class serving:
    """`novarl watch FOLDER --port 0`, until the end of the block. `page` leaves it before, and so has nothing to say
    about a server that is gone."""

    def __init__(self, folder: Path, page: Page | None = None) -> None:
        self.folder, self.page = folder, page

    def __enter__(self) -> Served:
        command = [sys.executable, "-m", "novarl", "watch", str(self.folder), "--port", "0"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", self.process.stdout.readline())
        assert found, "the address is printed first"
        return Served(self.folder, found[0])

    def __exit__(self, *_: object) -> None:
        if self.page is not None:
            self.page.goto("about:blank")
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of 1280 px that must end without a single message on the console, and without a request elsewhere."""
    yield from new_page(browser, 1280)


@pytest.fixture
def narrow(browser: Browser) -> Iterator[Page]:
    yield from new_page(browser, 400)


def new_page(browser: Browser, width: int) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": width, "height": 860}, reduced_motion="reduce")
    opened = context.new_page()
    opened.set_default_timeout(30_000)
    said: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: said.append(f"error: {error}"))
    opened.on("request", lambda request: asked.append(request.url))
    yield opened
    context.close()
    assert not said, "the console must stay empty"
    elsewhere = [url for url in asked if not url.startswith(("http://127.0.0.1:", "file://", "about:"))]
    assert not elsewhere, "nothing is asked from another host"
