"""An engine in a process of its own, spoken to over a local socket: `python socket_server.py MODEL`.

Frames are a length of four bytes and a pickle. It prints the port it listens on, on loopback only.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from typing import Any

import torch

from novarl.models.load import load
from novarl.run.machine import flush_denormals
from novarl.run.sampler import local_engine


async def read(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "big")
    return pickle.loads(await reader.readexactly(size))


def frame(value: Any) -> bytes:
    data = pickle.dumps(value)
    return len(data).to_bytes(4, "big") + data


async def serve(model: str) -> None:
    policy = load(model)
    engine = local_engine(policy)
    waiting: set[asyncio.Task[None]] = set()

    async def answer(writer: asyncio.StreamWriter, number: int, asked: tuple[Any, ...]) -> None:
        tokens, sampling, key = asked
        writer.write(frame((number, await engine.sample(tokens, sampling, key=key))))
        await writer.drain()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                kind, number, asked = await read(reader)
                if kind == "publish":
                    weights, version = asked
                    engine.publish(weights.items(), version)
                    writer.write(frame((number, version)))
                    await writer.drain()
                else:
                    task = asyncio.ensure_future(answer(writer, number, asked))
                    waiting.add(task)
                    task.add_done_callback(waiting.discard)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    torch.set_num_threads(1)
    flush_denormals()
    asyncio.run(serve(sys.argv[1]))
