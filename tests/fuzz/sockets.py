"""Bytes that need not be HTTP, sent as they are; and a server of songs that misbehaves."""

import asyncio
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from tests.fuzz.songs import mutated, small_songs
from tests.fuzz.traffic import NUM_CLIENTS, RAW, Request, Tally
from tests.server import Server

ANSWER_SECONDS = 30
PATIENCE_SECONDS = 1.5


async def send_raw(server: Server, texts: Iterable[bytes], tally: Tally) -> None:
    """Send each on a connection of its own; a fault is kept as a request of the method RAW."""
    port = int(server.url.rsplit(":", 1)[1])
    waiting = iter(texts)
    await asyncio.gather(*(_raw_client(port, waiting, tally) for _ in range(NUM_CLIENTS)))


async def _raw_client(port: int, waiting: Iterable[bytes], tally: Tally) -> None:
    for text in waiting:
        status = await send_bytes(port, text)
        wrong = f"status {status}" if status == "hang" or status.startswith("5") else None
        tally.note(Request(RAW, "bytes", (), text), status, wrong)


async def send_bytes(port: int, raw: bytes) -> str:
    """The status of the first answer, or `closed` where the server hangs up; `hang` where neither.

    A server that waits for more is told after a while that there is none.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            writer.write(raw)
            return await _first_status(reader, writer)
    except ConnectionError:
        return "closed"
    except TimeoutError:
        return "hang"
    finally:
        writer.close()


async def _first_status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (status := _status(await reader.read(65536))) == "100":
                pass
            return status
    except TimeoutError:
        writer.write_eof()
        return _status(await reader.read())


def _status(answer: bytes) -> str:
    return answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"


SONG_PATHS = (
    *("/opus", "/flac", "/mutated/1", "/mutated/2", "/mutated/3", "/redirect", "/away", "/loop"),
    *("/cut", "/huge", "/gzip", "/missing", "/empty", "/garbage"),
)


class SongHandler(BaseHTTPRequestHandler):
    """Answers with a song, or with something that only claims to be one."""

    def do_GET(self) -> None:
        songs = small_songs()
        path = self.path.removeprefix("/")
        if path in songs:
            self._answer(200, songs[path])
        elif path.startswith("mutated/"):
            self._answer(200, mutated(random.Random(path)))
        elif path in ("redirect", "away", "loop"):
            target = {"redirect": "/opus", "away": "http://169.254.169.254/", "loop": "/loop"}
            self._answer(302, b"", Location=target[path])
        elif path in ("cut", "huge"):
            claimed = {"cut": 9999, "huge": 10**13}
            self._answer(200, b"OggS", Content_Length=str(claimed[path]))
        elif path == "gzip":
            self._answer(200, b"\x1f\x8b", Content_Encoding="gzip")
        elif path in ("empty", "garbage"):
            self._answer(200, {"empty": b"", "garbage": b"\xff" * 5000}[path])
        else:
            self._answer(404, b"secret")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def song_server() -> Iterator[int]:
    """Serves on a port of loopback, which it yields."""
    with ThreadingHTTPServer(("127.0.0.1", 0), SongHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()
