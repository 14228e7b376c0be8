"""`python -m adapter serve`, and how long its event loop was held: for loop_hold.py.

A task wakes every few milliseconds and notes by how much it came late. At the end the delays go to
the file that WATCHED_SERVER_FILE names, a line of JSON each: [monotonic second, seconds late,
seconds that the loop's own thread computed meanwhile]. The rest it waited, for a processor or for
Python's lock.
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

TICK_SECONDS = 0.005
NOTED_SECONDS = 0.01
Delay = tuple[float, float, float]


class WatchedServer(server.Server):
    """The adapter's server with one more task in its loop."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        delays: list[Delay] = []
        watching = asyncio.create_task(watch(delays))
        try:
            await super().serve(sockets)
        finally:
            watching.cancel()
            write(delays)


def write(delays: list[Delay]) -> None:
    lines = "".join(f"{json.dumps(delay)}\n" for delay in delays)
    Path(os.environ["WATCHED_SERVER_FILE"]).write_text(lines, encoding="utf-8")


async def watch(delays: list[Delay]) -> None:
    while True:
        due, computed = time.monotonic() + TICK_SECONDS, time.thread_time()
        await asyncio.sleep(TICK_SECONDS)
        late_seconds = time.monotonic() - due
        if late_seconds > NOTED_SECONDS:
            delays.append((due, late_seconds, time.thread_time() - computed))


if __name__ == "__main__":
    server.Server = WatchedServer  # type: ignore[misc]
    sys.exit(main(["serve", *sys.argv[1:]]))
