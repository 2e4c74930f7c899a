"""Every view over HTTP, without a browser: hosts, headers, mistakes, events, Prometheus."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from novarl.dashboard.runs import Library
from novarl.dashboard.server import application, assets, ranges
from novarl.dashboard.views import Book
from novarl.observe.writer import RunWriter

ADDRESS = "http://127.0.0.1:8765"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        config = {"algo": "grpo", "lr": 1e-3 if name == "a" else 1e-4, "kl": {"coef": None}, "same": True}
        with RunWriter(tmp_path / name, writer="test", config=config, steps=3) as run:
            for step in (1, 2, 3):
                run.step(step, {"reward_mean": step / 10, "entropy": math.nan if step == 2 else 1, "time/step_s": 2})
                run.rollouts(step, [{"prompt": "p", "text": "t\ud800", "group": 0, "index": 0, "reward": 1.0}])
            run.event("alert", alert="odd", message='a "quoted" alert')
            run.event("alert", message="only a note")
    return tmp_path


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(application(Book(Library([folder]))), base_url=ADDRESS) as opened:
        yield opened


@pytest.mark.parametrize(
    "path",
    [
        "/health", "/alerts", "/api/alerts?run=a", "/api/runs", "/api/run?run=a", "/api/curves?run=a",
        "/api/stages?run=a",
        "/api/config?run=a&run=b", "/api/steps?run=a", "/api/groups?run=a&step=1", "/api/group?run=a&step=1&group=0",
        "/api/prompt?run=a&key=p", "/api/find?run=a&after=0",
    ],
)  # fmt: skip
def test_every_view_is_strict_json_with_security_headers(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_what_the_views_say(client: TestClient) -> None:
    runs = client.get("/api/runs").json()["runs"]
    assert {run["name"]: run["alerts"] for run in runs} == {"a": 2, "b": 2}  # the odd one, and a NaN
    curves = client.get("/api/curves?run=a&metric=entropy").json()
    assert curves["series"]["entropy"] | {"smooth": 0} == {
        "x": [1, 3], "y": [1, 1], "count": 2, "nonfinite": [2], "nonfinite_count": 1, "smooth": 0,
    }  # fmt: skip
    assert client.get("/api/stages?run=a").json()["stages"] == {"step": 2}
    config = client.get("/api/config?run=a&run=b").json()
    assert [row["key"] for row in config["rows"] if row["differs"]] == ["lr"]
    assert [row["values"] for row in config["rows"] if row["key"] == "kl.coef"] == [["null", "null"]]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/api/run", "run: is required"),
        ("/api/run?run=../a", "no run is named '../a'"),
        ("/api/groups?run=a", "step: is required"),
        ("/api/groups?run=a&step=x", "step: must be a whole number, got 'x'"),
        ("/api/groups?run=a&step=9", "the rollouts of step 9 were not logged"),
        ("/api/groups?run=a&step=1&reward_min=x", "reward_min: must be a number"),
        ("/api/group?run=a&step=1&group=7", "step 1 has no group 7"),
    ],
)
def test_a_mistake_is_one_sentence(client: TestClient, path: str, said: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 400 and said in answer.json()["error"] and "\n" not in answer.json()["error"]


def test_a_damaged_run_is_one_sentence_and_the_others_are_shown(client: TestClient, folder: Path) -> None:
    (folder / "a/manifest.json").write_text('{"format": 7}')
    for view in ("run", "curves"):
        answer = client.get(f"/api/{view}?run=a")
        assert answer.status_code == 400 and "run directory format 7" in answer.json()["error"]
    assert client.get("/api/run?run=b").status_code == 200
    (folder / "b/summary.json").write_text("{")
    assert "is damaged" in client.get("/alerts").json()["unreadable"]["b"]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost:1.evil", "", "[::1", "0.0.0.0:8765"]
)
def test_foreign_hosts_are_refused(client: TestClient, host: str) -> None:
    for path in ("/", "/api/runs", "/static/app.js", "/nowhere"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421 and "this machine only" in answer.text
        assert "default-src" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:9999", "[::1]:8765", "[::1]"])
def test_this_machine_is_served_also_through_a_tunnel(client: TestClient, host: str) -> None:
    assert client.get("/health", headers={"host": host}).json() == {"status": "ok", "runs": 2}


def test_only_the_files_of_the_page_are_served(client: TestClient) -> None:
    for path, (content, kind) in assets().items():
        answer = client.get(path)
        assert answer.content == content and answer.headers["content-type"].startswith(kind)
    for path in ("/static/", "/static/../server.py", "/static/%2e%2e/server.py", "/static/app.js/", "/../server.py"):
        assert client.get(path).status_code == 404
    assert client.post("/api/runs").status_code == 405


def test_the_page_asks_nothing_from_elsewhere() -> None:
    for path, (content, _) in assets().items():
        text = content.decode()
        if "vendor" not in path:
            assert "innerHTML" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", ""), path
            assert "https://" not in text and "eval(" not in text and "style=" not in text, path
    assert any(path.endswith("uPlot.LICENSE.txt") for path in assets())


def test_prometheus(client: TestClient, folder: Path) -> None:
    (folder / "a").rename(folder / 'x"\\')
    book = Book(Library([folder]))
    with TestClient(application(book), base_url=ADDRESS) as opened:
        lines = opened.get("/metrics").text.splitlines()
    assert 'novarl_reward_mean{run="b",phase="test",metric="reward_mean"} 0.3'.replace('"test"', '"rl"') in lines
    assert 'novarl_time_step_s{run="x\\"\\\\",phase="rl",metric="time/step_s"} 2.0' in lines
    assert 'novarl_alerts{run="b"} 2.0' in lines
    families = [line.split(" ")[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families)), "each family once"


def test_steps_as_ranges() -> None:
    assert ranges([]) == [] and ranges([7]) == [[7, 7, 1]]
    assert ranges([1, 2, 3, 10, 20, 30, 31]) == [[1, 3, 1], [10, 30, 10], [31, 31, 1]]
    assert ranges(list(range(1, 100_001))) == [[1, 100_000, 1]]


def test_changes_are_told_once(folder: Path) -> None:
    from novarl.dashboard.server import Changes

    book = Book(Library([folder]))
    changes = Changes(book, lambda: False)
    look: Any = changes._look
    assert look() == (False, ["a", "b"]) and look() == (False, [])
    RunWriter(folder / "b", writer="test", extend=True).step(4, {"reward_mean": 1})
    assert look() == (False, ["b"])
    RunWriter(folder / "c", writer="test")
    assert look() == (True, ["c"]) and look() == (False, [])
