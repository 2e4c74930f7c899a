"""The real libraries, offline: a run with all three trackers, read back through each library's own reader."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from novarl.observe.sinks.jsonl import read_metrics
from novarl.observe.trackers.sink import TrackerSink
from tests.compose.harness import ON_TASK, ROOT, finished

SECRET = "correct-horse-battery-staple"
HF = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
NOT_METRICS = {"schema", "phase", "step"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two updates and a warm-up, without a network; secrets in its environment, command line and settings."""
    folder = tmp_path_factory.mktemp("tracked")

    def refuse(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"no network in this test: {address}")
        return connect(self, address)

    connect = socket.socket.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(socket.socket, "connect", refuse)
        patch.setitem(TrackerSink.__init__.__kwdefaults__, "limit", 600.0)  # however busy the machine is
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("NETRC", str(folder / "no-netrc"))
        patch.setenv("JUDGE_API_KEY", SECRET)
        patch.setattr(sys, "argv", ["novarl", "rl", f"judge.api_key={SECRET}", "--token", HF])
        for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            patch.delenv(name, raising=False)
        words = ("log.trackers=[trackio,wandb,mlflow]", "log.project=shelf", "log.run_name=first", "log.artifacts=true")
        ended = finished("rl", *ON_TASK, "steps=2", "log.console=true", "log.samples_every=1", "run_dir=run", *words)
        assert "W&B has no API key, so the run is recorded offline" in ended.out
        assert "are missing there" not in ended.out + ended.err
        assert "Trackio" not in ended.out and "INFO" not in ended.err  # what libraries print would tear the live line
        yield folder / "run"


def expected(run: Path) -> list[tuple[int, dict[str, float]]]:
    """The rows of metrics.jsonl as trackers name them."""
    found = []
    for row in read_metrics(run / "metrics.jsonl"):
        prefix = "warmup/" if row["phase"] == "warmup" else ""
        found.append((row["step"], {prefix + key: value for key, value in row.items() if key not in NOT_METRICS}))
    return found


def test_trackio_has_metrics_jsonl(run: Path) -> None:
    with sqlite3.connect(run.parent / "trackio" / "shelf.db") as data:
        rows = [
            (step, json.loads(text)) for step, text in data.execute("select step, metrics from metrics order by id")
        ]
        (config,) = (json.loads(text) for (text,) in data.execute("select config from configs"))
        names = {name for (name,) in data.execute("select run_name from metrics")}
    numbers = [(step, row) for step, row in rows if not {"samples", "before/score", "after/score"} & set(row)]
    assert numbers == expected(run) and names == {"first"}
    (table,) = (row["samples"]["_value"] for _, row in rows if "samples" in row)
    assert len(table) == 2 and {"step", "prompt", "answer", "reward"} <= set(table[0])
    assert config["task"] == "sort" and config["steps"] == 2


def records(folder: Path) -> list[Any]:
    """The records of the offline file, in W&B's own messages. The file is a LevelDB log: blocks of 32 KiB, in which
    each piece has a checksum (4 bytes), a length (2) and a type (1 whole, 2 first, 3 middle, 4 last)."""
    from wandb.proto import wandb_internal_pb2

    (file,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    data, at, found, part = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    assert data[:4] == b":W&B" and found
    return found


def history(found: list[Any]) -> list[dict[str, Any]]:
    """The logged rows, without what W&B adds."""
    rows = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows


def test_wandb_has_metrics_jsonl(run: Path) -> None:
    found = records(run.parent)
    rows = history(found)
    others = [row for row in rows if any(key.startswith(("samples", "before/", "after/")) for key in row)]
    numbers = [row for row in rows if row not in others]
    wanted = [{"step": step, **row} for step, row in expected(run)]
    assert numbers == wanted
    assert sum("samples.path" in row for row in others) == 1 and len(others) == 3
    started = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    assert (started.project, started.display_name, started.run_id) == (
        "shelf", "first", json.loads((run / "trackers.json").read_text())["id"],
    )  # fmt: skip
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["task"] == "sort" and config["steps"] == 2


def test_mlflow_has_metrics_jsonl(run: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{run.parent / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri, registry_uri=f"file:{run.parent}/registry")
    experiment = client.get_experiment_by_name("shelf")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "first" and found.data.params["task"] == "sort"
    wanted: dict[str, list[tuple[int, float]]] = {}
    for step, row in expected(run):
        for name, value in row.items():
            wanted.setdefault(name, []).append((step, value))
    for name, values in wanted.items():
        history = client.get_metric_history(found.info.run_id, name)
        assert sorted((metric.step, metric.value) for metric in history) == sorted(values), name
    names = {item.path for item in client.list_artifacts(found.info.run_id)}
    assert {"samples.json", "model"} <= names
    assert client.list_artifacts(found.info.run_id, "model")


def test_no_secret_is_in_anything_that_was_recorded(run: Path) -> None:
    places = [run.parent / "trackio", run.parent / "wandb", run.parent / "mlflow.db", run.parent / "mlartifacts"]
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*")) if file.is_file()]
    assert len(files) > 5
    for file in files:
        data = file.read_bytes()
        assert SECRET.encode() not in data and HF.encode() not in data, file


def test_the_run_is_the_same_with_and_without_trackers(run: Path) -> None:
    finished("rl", *ON_TASK, "steps=2", "log.console=true", "log.samples_every=1", "run_dir=bare")
    for name in ("rollouts/step-000002.jsonl", "evals/step-000002.jsonl"):
        assert (run / name).read_bytes() == (run.parent / "bare" / name).read_bytes()
    lines = [(place / "metrics.jsonl").read_text().splitlines() for place in (run, run.parent / "bare")]
    both = [[{k: v for k, v in json.loads(line).items() if k[:5] != "time/"} for line in text] for text in lines]
    assert both[0] == both[1]


def test_not_a_number_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from novarl.observe.trackers.registry import Tracking, open_trackers

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    for sink in open_trackers(Tracking(("wandb", "mlflow"), project="q"), tmp_path):
        sink.step(1, {"kl": math.nan, "ratio_max": math.inf, "bad name[0]": 1.0})
        assert sink.conclude() is None
    (row,) = history(records(tmp_path))
    assert math.isnan(row["kl"]) and row["ratio_max"] == math.inf and row["bad name[0]"] == 1.0
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}", f"file:{tmp_path}/registry")
    (found,) = client.search_runs([client.get_experiment_by_name("q").experiment_id])  # type: ignore[union-attr]
    assert math.isnan(found.data.metrics["kl"]) and found.data.metrics["ratio_max"] > 1e300
    assert found.data.metrics["bad name_0_"] == 1.0


def surroundings() -> dict[str, str]:
    """The environment of a new process, without WANDB_SERVICE, which would lead to the process of the tests before."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}, "PYTHONPATH": str(ROOT)}


UNREACHABLE = """
import sys
from pathlib import Path
from novarl.observe.trackers import wandb_tracker
from novarl.observe.trackers.registry import Tracking, open_trackers

wandb_tracker.INIT_TIMEOUT = 3.0
(sink,) = open_trackers(Tracking(("wandb",), project="q"), Path())
sink.step(1, {"kl": 0.5})
said = sink.conclude()
assert said is None, said
"""


def test_wandb_without_a_network_is_recorded_offline(tmp_path: Path) -> None:
    """An API key, and a server that nothing answers for."""
    key = "0123456789abcdef0123456789abcdef01234567"
    environment = {**surroundings(), "WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", UNREACHABLE], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert history(records(tmp_path)) == [{"step": 1, "kl": 0.5}]
    files = [file for file in (tmp_path / "wandb").rglob("*") if file.is_file()]
    assert files and not any(key.encode() in file.read_bytes() for file in files)


STOPPED = """
import os, signal, sys, time
from pathlib import Path
import psutil
from novarl.observe.trackers.registry import Tracking, open_trackers

(sink,) = open_trackers(Tracking(("wandb",), project="q"), Path())
sink.limit = 2.0
sink.step(1, {"kl": 0.5})
while not (found := [p for p in psutil.Process().children(recursive=True) if "wandb" in " ".join(p.cmdline())]):
    time.sleep(0.1)
while sink._jobs or sink._deadline is not None:
    time.sleep(0.1)
for process in found:
    process.send_signal(signal.SIGSTOP)
Path("pids").write_text(" ".join(str(process.pid) for process in found))
for step in range(2, 3000):
    sink.step(step, {f"m{number}": 0.5 for number in range(50)})
print(sink.conclude())
"""


def test_a_process_of_wandb_that_hangs_keeps_nothing_from_ending(tmp_path: Path) -> None:
    """W&B's own process is stopped in the middle of a run."""
    environment = {**surroundings(), "WANDB_MODE": "offline"}
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-c", STOPPED]
        try:
            done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=out, stderr=out, timeout=120)
        finally:
            for number in (tmp_path / "pids").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
    said = (tmp_path / "out").read_text()
    assert done.returncode == 0 and "it did not answer in time, and the run ended without it" in said


def test_a_resumed_run_goes_on_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    from novarl.observe.trackers.registry import Tracking, open_trackers

    monkeypatch.chdir(tmp_path)
    os.makedirs("x")
    for step in (1, 2):
        (sink,) = open_trackers(Tracking(("mlflow",), project="q", config={"a": 1}), tmp_path / "x")
        sink.step(step, {"kl": 0.5})
        assert sink.conclude() is None
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}", f"file:{tmp_path}/registry")
    (found,) = client.search_runs([client.get_experiment_by_name("q").experiment_id])  # type: ignore[union-attr]
    assert [metric.step for metric in client.get_metric_history(found.info.run_id, "kl")] == [1, 2]
