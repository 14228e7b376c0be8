"""`python -m adapter serve` with a second door, for overhead.py and first_delta.py: what comes in
there is asked of the server's own AsyncLLM directly.

A connection to the Unix socket TWO_DOOR_SOCKET takes a line of JSON, {"song": path, "prompts":
[text], "max_new_tokens"}, and answers with one, the seconds from that file to the first token and
to the last.
"""

import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path

from adapter import server
from adapter.__main__ import main
from adapter.engine import VllmEngine
from benchmarks.async_llm import Engine
from benchmarks.workload import read_song


class TwoDoorServer(server.Server):
    """The adapter's server; the other door needs it to be ready."""

    _direct: Engine | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        async with await asyncio.start_unix_server(self._answer, os.environ["TWO_DOOR_SOCKET"]):
            await super().serve(sockets)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        direct = await self._engine()
        path = Path(asked["song"])
        started = time.perf_counter()
        samples = await asyncio.to_thread(read_song, path)
        first_at = await asyncio.gather(
            *(
                direct.first_token_at(samples, path.name, prompt, asked["max_new_tokens"])
                for prompt in asked["prompts"]
            )
        )
        seconds = [at - started for at in (min(first_at), time.perf_counter())]
        writer.write(json.dumps(seconds).encode() + b"\n")
        await writer.drain()
        writer.close()

    async def _engine(self) -> Engine:
        if self._direct is None:
            engine = await self._supervisor.running()
            assert isinstance(engine, VllmEngine)
            self._direct = Engine(engine.llm, self._supervisor.service.checkpoint)
        return self._direct


if __name__ == "__main__":
    server.Server = TwoDoorServer  # type: ignore[misc]
    sys.exit(main(["serve", *sys.argv[1:]]))
