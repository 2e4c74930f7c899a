"""A second engine: it shares nothing with the learner and hears of new weights through `publish` alone."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import novarl
from novarl.compose.rl import RLTraining
from novarl.core.types import Completion, Sampling
from tests.compose.harness import deterministic_metrics, lightly, weights
from tests.engines.socket_server import frame, read


class SocketEngine:
    """The client: implements `novarl.core.types.Engine`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.numbers = itertools.count()
        self.publisher = socket.create_connection(("127.0.0.1", port))
        self.published: list[int] = []
        self.waiting: dict[int, asyncio.Future[Completion]] = {}
        self.connected: asyncio.Task[asyncio.StreamWriter] | None = None
        self.listening: asyncio.Task[None] | None = None

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, key: str) -> Completion:
        self.connected = self.connected or asyncio.ensure_future(self._connect())
        writer = await asyncio.shield(self.connected)
        number = next(self.numbers)
        self.waiting[number] = asyncio.get_running_loop().create_future()
        writer.write(frame(("sample", number, (tuple(tokens), sampling, key))))
        return await self.waiting[number]

    def publish(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        assert weights is not None, "it does not share the learner's modules"
        self.publisher.sendall(frame(("publish", next(self.numbers), (dict(weights), version))))
        size = int.from_bytes(self._receive(4), "big")
        assert pickle.loads(self._receive(size))[1] == version
        self.published.append(version)

    def close(self) -> None:
        if self.listening is not None and not self.listening.get_loop().is_closed():
            self.listening.cancel()
        self.publisher.close()

    async def _connect(self) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.listening = asyncio.ensure_future(self._listen(reader))
        return writer

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while True:
            number, completion = await read(reader)
            self.waiting.pop(number).set_result(completion)

    def _receive(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            found += self.publisher.recv(size - len(found))
        return found


@pytest.fixture
def port() -> Iterator[int]:
    server = Path(__file__).with_name("socket_server.py")
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    import os

    process = subprocess.Popen(
        [sys.executable, str(server), "tiny"], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def trained(run_dir: Path, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """A short run from the same start."""
    quiet = {"console": False, "tensorboard": False}
    size = {"steps": 3, "prompts_per_rollout": 4, "responses_per_prompt": 4, "warmup": 8}
    with (
        lightly(),
        novarl.RL(prompts="bandit", learning_rate=3e-3, run_dir=run_dir, log=quiet, **size, **settings) as run,
    ):
        run.run()
    return deterministic_metrics(run_dir), weights(run_dir)


def test_it_trains_and_evaluates_on_the_right_weights(port: int, tmp_path: Path) -> None:
    """Whatever samples, a request's tokens depend on weights and key alone: so the runs are the same to the bit."""
    settings: dict[str, Any] = {"eval_every": 1, "eval": {"n": 4}, "rollout": {"max_tokens": 4}}
    here, mine = trained(tmp_path / "here", **settings)
    assert len({row["reward_mean"] for row in here if row["phase"] == "rl"}) > 1, "rewards vary"
    assert any(row["grad_norm"] > 0 for row in here if row["phase"] == "rl")
    engine = SocketEngine(port)
    there, theirs = trained(tmp_path / "there", engine=engine, **settings)
    assert here == there
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert engine.published[-1] == 3 and sorted(engine.published) == engine.published


def test_an_evaluation_on_old_weights_is_noticed(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the test above would catch: nothing is published before an evaluation."""
    settings: dict[str, Any] = {"eval_every": 1, "eval": {"n": 8}, "rollout": {"max_tokens": 4}}
    here, _ = trained(tmp_path / "here", **settings)
    monkeypatch.setattr(RLTraining, "publish", lambda self: None)
    there, _ = trained(tmp_path / "there", engine=SocketEngine(port), **settings)
    scores = [[row["eval/score"] for row in rows if "eval/score" in row] for rows in (here, there)]
    lengths = [[row["eval/length_mean"] for row in rows if "eval/length_mean" in row] for rows in (here, there)]
    assert scores[0] != scores[1] or lengths[0] != lengths[1]
