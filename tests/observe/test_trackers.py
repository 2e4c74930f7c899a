"""Trackers that work, fail, hang and are slow: the run goes on, what is missing is counted, and no secret is sent."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from novarl.core.errors import NovaError
from novarl.observe.trackers import exits
from novarl.observe.trackers.redact import HIDDEN, redacted
from novarl.observe.trackers.registry import FILE, Tracking, check, notes, open_trackers
from novarl.observe.trackers.sink import TRIES, TrackerSink
from novarl.observe.trackers.tracker import About
from novarl.observe.trackers.wandb_tracker import mode


class Fake:
    """Remembers everything. `on(name)` is called at the start of every method."""

    def __init__(self, on: Callable[[str], None] = lambda name: None) -> None:
        self.on, self.about, self.rows = on, About("", "", "", Path()), []
        self.calls: list[tuple[Any, ...]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.tables: dict[str, Sequence[Sequence[Any]]] = {}
        self.threads: set[int] = set()

    def start(self, about: About) -> None:
        self._called("start")
        self.about = about

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._called("log")
        self.rows.append((step, dict(values)))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._called("table")
        self.tables[name] = rows

    def system(self) -> None:
        self._called("system")

    def artifact(self, path: Path, name: str) -> None:
        self._called("artifact", path.name)

    def finish(self, status: str) -> None:
        self._called("finish", status)

    def _called(self, *words: str) -> None:
        self.calls.append(words)
        self.threads.add(threading.get_ident())
        self.on(words[0])


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sink_of(fake: Fake, **options: Any) -> TrackerSink:
    return TrackerSink("fake", fake, About("p", "n", "i", Path()), **options)


def failing(name: str, error: BaseException) -> Callable[[str], None]:
    def on(called: str) -> None:
        if called == name:
            raise error

    return on


def test_everything_arrives_in_order_in_one_other_thread(tmp_path: Path) -> None:
    fake = Fake()
    sink = sink_of(fake, artifacts=True)
    sink.event("phase", {"name": "warmup", "steps": 1})
    sink.step(1, {"loss": 2.0})
    sink.event("phase", {"name": "rl", "steps": 2})
    sink.event("eval", {"name": "before", "score": 0.25})
    for step in (1, 2):
        sink.step(step, {"step": float(step), "reward_mean": step / 10, "kl": float("nan")})
    sink.event("sample", {"prompt": "1+1=", "text": "2", "answer": "2", "reward": 1.0})
    (tmp_path / "model").mkdir()
    sink.event("summary", {"status": "done", "paths": {"model": str(tmp_path / "model"), "samples": "not/there"}})
    assert sink.conclude() is None and sink.conclude() is None
    assert [row[0] for row in fake.rows] == [1, 0, 1, 2]
    assert fake.rows[0][1] == {"warmup/loss": 2.0} and fake.rows[1][1] == {"before/score": 0.25}
    assert fake.rows[3][1]["reward_mean"] == 0.2 and "step" not in fake.rows[3][1]
    assert fake.tables["samples"] == [(2, "1+1=", "2", "2", 1.0)]
    assert [call for call in fake.calls if call[0] in ("artifact", "finish")] == [
        ("artifact", "model"),
        ("finish", "done"),
    ]
    assert len(fake.threads) == 1 and threading.get_ident() not in fake.threads


def test_a_tracker_that_hangs_takes_nothing_and_is_left() -> None:
    stuck, inside, clock = threading.Event(), threading.Event(), Clock()

    def on(name: str) -> None:
        if name == "log":
            inside.set()
            stuck.wait()

    fake = Fake(on)
    sink = sink_of(fake, capacity=10, limit=30.0, clock=clock)
    sink.step(1, {"loss": 1.0})
    assert inside.wait(60)
    for step in range(2, 101):
        sink.step(step, {"loss": 1.0})
    clock.now = 31.0  # it has hung for as long as it may, so the end of the run does not wait
    assert sink.conclude() == (
        "Tracker fake: 100 of 100 records are missing there: it did not answer in time, and the run ended without it. "
        "metrics.jsonl has all of them"
    )
    assert len(fake.calls) == 2 and sink.dropped == 89
    stuck.set()


def test_a_tracker_that_hangs_at_the_end_is_given_its_time() -> None:
    stuck, clock = threading.Event(), Clock()

    def on(name: str) -> None:
        if name == "finish":
            clock.now = 1000.0  # later than the limit that begins with this call
            stuck.wait()

    sink = sink_of(Fake(on), limit=30.0, clock=clock)
    sink.step(1, {"loss": 1.0})
    said = sink.conclude()
    assert said is not None and "did not answer in time" in said
    stuck.set()


def test_a_slow_tracker_gets_what_fits_and_the_rest_is_counted() -> None:
    first, go = threading.Event(), threading.Event()

    def on(name: str) -> None:
        if name == "log":
            first.set()
            go.wait(60)

    fake = Fake(on)
    sink = sink_of(fake, capacity=5)
    sink.step(1, {"loss": 1.0})
    assert first.wait(60)
    for step in range(2, 21):
        sink.step(step, {"loss": 1.0})
    go.set()
    assert sink.conclude() == (
        "Tracker fake: 14 of 20 records are missing there: it was too slow. metrics.jsonl has all of them"
    )
    assert [step for step, _ in fake.rows] == [1, 2, 3, 4, 5, 6] and fake.calls[-1] == ("finish", "failed")


def test_a_tracker_that_cannot_start_receives_nothing() -> None:
    fake = Fake(failing("start", ConnectionError("no route to host\nsecond line")))
    sink = sink_of(fake)
    for step in range(5):
        sink.step(step, {"loss": 1.0})
    assert sink.conclude() == (
        "Tracker fake: 5 of 5 records are missing there: it failed (ConnectionError: no route to host). "
        "metrics.jsonl has all of them"
    )
    assert fake.calls == [("start",)]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1)])
def test_a_tracker_that_fails_again_and_again_is_stopped(error: BaseException) -> None:
    fake = Fake(failing("log", error))
    sink = sink_of(fake)
    for step in range(20):
        sink.step(step, {"loss": 1.0})
    said = sink.conclude()
    assert said is not None and "20 of 20 records are missing" in said and type(error).__name__ in said
    assert [call[0] for call in fake.calls] == ["start", *["log"] * TRIES, "finish"]


def test_a_single_failure_loses_one_record() -> None:
    left = [ConnectionError("reset")]
    fake = Fake(lambda name: exec("raise left.pop()", {"left": left}) if name == "log" and left else None)
    sink = sink_of(fake)
    for step in range(4):
        sink.step(step, {"loss": 1.0})
    said = sink.conclude()
    assert said is not None and said.startswith("Tracker fake: 1 of 4 records are missing there: it failed (Connection")
    assert [step for step, _ in fake.rows] == [1, 2, 3]


@pytest.mark.parametrize("hangs", [False, True])
def test_the_exit_functions_of_a_tracker_that_was_left_are_not_called(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of a library that would wait for its own process, forever."""
    stuck, clock = threading.Event(), Clock()
    registered: list[Any] = []
    monkeypatch.setattr(exits, "_register", lambda function, *args, **kwargs: registered.append(function))

    def on(name: str) -> None:
        if name == "start":
            atexit.register(print, "bye")
        elif name == "finish" and hangs:
            clock.now = 1000.0
            stuck.wait()

    sink = sink_of(Fake(on), clock=clock)
    assert (sink.conclude() is None) is not hangs
    assert len(registered) == (not hangs)
    atexit.register(print, "of the main thread")
    assert len(registered) == 1 + (not hangs)
    stuck.set()


def test_closing_prints_what_is_missing_once(capsys: pytest.CaptureFixture[str]) -> None:
    sink = sink_of(Fake(failing("start", ValueError("x"))))
    sink.step(1, {"loss": 1.0})
    sink.close()
    sink.close()
    assert capsys.readouterr().err.count("Tracker fake: 1 of 1 records") == 1


SECRETS = {
    "hf_token": "x",
    "logger.wandb.key": "y",
    "OPENAI_API_KEY": "z",
    "db": {"password": "p"},
    "note": "use hf_AbCdEfGhIjKlMnOpQrStUv and " + "0123456789abcdef0123456789abcdef01234567",
    "url": "https://me:pass@host/x",
    "header": "Bearer abcdefghijkl",
    "argv": ["rl", "--api-key", "SECRET1", "reward.judge.api_key=SECRET2", "prompt_key=q", "--hf_token=SECRET3", "x"],
}


def test_secrets_are_removed_and_nothing_else() -> None:
    found = redacted(SECRETS, known=())
    assert (
        found["hf_token"] == found["logger.wandb.key"] == found["OPENAI_API_KEY"] == found["db"]["password"] == HIDDEN
    )
    assert found["note"] == f"use {HIDDEN} and {HIDDEN}" and found["url"] == f"https://{HIDDEN}:{HIDDEN}@host/x"
    assert found["header"] == f"Bearer {HIDDEN}"
    assert found["argv"] == ["rl", "--api-key", HIDDEN, f"reward.judge.api_key={HIDDEN}", "prompt_key=q",
                             f"--hf_token={HIDDEN}", "x"]  # fmt: skip
    kept = {"rollout.max_tokens": 5, "prompt_key": "question", "loss.agg": "token", "model": "a/b-1.5", "lr": None}
    kept |= {"commit": "0123456789abcdef0123456789abcdef01234567", "data": "x" * 70, "stop": ["</s>"]}
    assert redacted(kept, known=()) == kept


def test_values_of_secret_environment_variables_are_removed_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct-horse-battery")
    assert redacted({"prompt": "say correct-horse-battery!"}) == {"prompt": f"say {HIDDEN}!"}
    fake = Fake(failing("start", ValueError("401 for correct-horse-battery")))
    sink = sink_of(fake)
    said = sink.conclude()
    assert said is not None and "correct-horse" not in said and HIDDEN in said


def test_the_run_is_described_without_secrets_and_keeps_its_id(tmp_path: Path) -> None:
    manifest = {"novarl": "1", "argv": ["rl", "judge.api_key=SECRET"], "code": {"commit": "a" * 40}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    config = {"optim": {"lr": 0.1}, "reward": {"judge": {"api_key": "SECRET"}}, "stop": []}
    tracking = Tracking(("trackio", "mlflow"), project="p", config=config)
    fakes: list[Fake] = []

    def make(name: str) -> Fake:
        fakes.append(Fake())
        return fakes[-1]

    for _ in range(2):
        for sink in open_trackers(tracking, tmp_path, make=make):
            sink.close()
    about, again = fakes[0].about, fakes[2].about
    assert (about.project, about.name, about.resumed, again.resumed) == ("p", tmp_path.name, False, True)
    assert about.id == again.id == fakes[1].about.id == json.loads((tmp_path / FILE).read_text())["id"]
    assert about.config["optim.lr"] == 0.1 and about.config["manifest.code.commit"] == "a" * 40
    assert "SECRET" not in json.dumps(dict(about.config)) and HIDDEN in about.config["reward.judge.api_key"]
    assert open_trackers(Tracking(), tmp_path / "none") == [] and not (tmp_path / "none").exists()


def test_wandb_without_a_key_is_offline_and_said_so(tmp_path: Path) -> None:
    nothing = {"NETRC": str(tmp_path / "netrc")}
    assert mode(nothing) == "offline" and mode({**nothing, "WANDB_API_KEY": "k"}) == "online"
    assert mode({**nothing, "WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}) == "disabled"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k\n")
    assert mode(nothing) == "online" and mode({**nothing, "WANDB_BASE_URL": "https://w.example.org"}) == "offline"
    (said,) = notes(["wandb"], {"NETRC": os.devnull})
    assert "recorded offline in ./wandb" in said and "wandb sync" in said
    assert notes(["mlflow"], {}) == notes(["wandb"], {"WANDB_MODE": "offline"}) == []


def test_a_tracker_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NovaError, match=r"log.trackers: wandb is not installed \(pip install 'novarl\[track\]'\)"):
        check(["wandb"])
    with pytest.raises(NovaError, match="unknown tracker 'wandbb'"):
        check(["wandbb"])
