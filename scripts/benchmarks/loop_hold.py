"""How long the server's event loop is held, and /health waits, while four long songs arrive.

    python -m benchmarks.loop_hold                    20-minute songs, the demo checkpoint on vLLM

The songs come at once: as a WAV upload, in base64 (51 MB of JSON), as an MP3 upload, by URL.
The server runs under a task that wakes every 5 ms and notes by how much it came late; another
process asks for /health every 50 ms. A table, and as the last line one JSON document, go to stdout.
The exit code is 1 where a limit was passed.
"""

import argparse
import base64
import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from demo_song import write_song

from benchmarks.adapter_server import running_server, settings_of
from benchmarks.arguments import make_parser
from benchmarks.report import describe_machine, describe_versions
from benchmarks.workload import (
    RATE,
    SHIFT_SAMPLES,
    decode,
    make_model,
    make_warm_up_song,
    prepare_environment,
    write_mp3,
    write_wav,
)

COMMAND = (sys.executable, str(Path(__file__).with_name("watched_server.py")))
POLL_SECONDS = 0.05
HOLD_LIMIT_SECONDS = 0.1
HEALTH_LIMIT_SECONDS = 0.2
PROMPTS = [
    {"prompt": "Describe this music.", "max_new_tokens": 4},
    {"prompt": "Which key is it in?", "max_new_tokens": 4},
]
Body = tuple[bytes, str]  # and its content type
Delay = tuple[float, float]  # seconds late, and those of them that the loop's thread computed


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_environment(demo=not args.model)
    with tempfile.TemporaryDirectory(prefix="music-flamingo-hold-") as name:
        folder = Path(name)
        songs = make_songs(args.seconds, folder)
        model = args.model or make_model(args.shape, folder)
        settings = settings_of(model, args.engine, args.dtype) | {
            "ADAPTER_ALLOW_PRIVATE_AUDIO_URLS": "true",
            "WATCHED_SERVER_FILE": str(folder / "delays"),
        }
        with file_server(folder) as files, running_server(settings, COMMAND) as server:
            send(server.url, {"": make_body(make_warm_up_song(folder), files)})
            window, answers, waits = measure(server.url, make_bodies(songs, files))
        delays = read_delays(folder / "delays", window)
    return finish(args, window, answers, waits, delays)


def make_songs(seconds: float, folder: Path) -> list[Path]:
    """Each another one; their names say how they are sent."""
    write_song(folder / "made.wav", seconds=60)
    samples = np.resize(decode(folder / "made.wav"), int(seconds * RATE))  # again and again
    paths = [folder / f"{name}.{form}" for name, form in SENDERS]
    for index, path in enumerate(paths):
        write = write_mp3 if path.suffix == ".mp3" else write_wav
        write(path, np.roll(samples, -index * SHIFT_SAMPLES))
    return paths


SENDERS = (("upload", "mp3"), ("upload", "wav"), ("base64", "wav"), ("url", "wav"))


def finish(
    args: argparse.Namespace,
    window: tuple[float, float],
    answers: dict[str, float],
    waits: list[float],
    delays: list[Delay],
) -> int:
    (hold, own), wait = next(iter(delays), (0.0, 0.0)), max(waits)
    failed = hold > HOLD_LIMIT_SECONDS or wait > HEALTH_LIMIT_SECONDS
    for name, seconds in answers.items():
        print(f"{name:<12} answered after {seconds:.2f} s")
    print(
        f"loop         held for {hold * 1000:.0f} ms at most (limit 100), of which it computed "
        f"{own * 1000:.0f} ms; {len(delays)} times late"
    )
    print(
        f"/health      {wait * 1000:.0f} ms at most (limit 200), "
        f"{median(waits) * 1000:.1f} ms in the middle of {len(waits)}"
    )
    document = {
        "benchmark": "music-flamingo-adapter loop_hold",
        "arguments": vars(args),
        "seconds": window[1] - window[0],
        "answered_after_seconds": answers,
        "longest_hold_seconds": hold,
        "longest_health_seconds": wait,
        "late_and_computed_seconds": delays[:50],
        "versions": describe_versions(),
        "machine": describe_machine(),
    }
    print(json.dumps(document))
    return int(failed)


def make_bodies(songs: Sequence[Path], files: str) -> dict[str, Body]:
    """The bodies, made before anything is measured."""
    return {f"{song.stem} {song.suffix[1:]}": make_body(song, files) for song in songs}


def make_body(song: Path, files: str) -> Body:
    batch: dict[str, Any] = {"prompts": PROMPTS}
    if song.stem == "base64":
        batch["audio"] = base64.b64encode(song.read_bytes()).decode()
    if song.stem == "url":
        batch["audio_url"] = f"{files}/{song.name}"
    if song.stem in ("base64", "url"):
        return json.dumps(batch).encode(), "application/json"
    parts: dict[str, Any] = {
        "request": (None, json.dumps(batch), "application/json"),
        "audio": (song.name, song.read_bytes(), "application/octet-stream"),
    }
    request = httpx.Request("POST", "http://localhost", files=parts)
    return request.read(), request.headers["content-type"]


def send(url: str, bodies: dict[str, Body]) -> dict[str, float]:
    """All at once; after how many seconds each was answered."""

    def post(body: Body) -> float:
        started = time.monotonic()
        headers = {"content-type": body[1]}
        response = httpx.post(
            f"{url}/generate_batch", content=body[0], headers=headers, timeout=None
        )
        if response.status_code != 200:
            raise RuntimeError(f"the server answered {response.status_code}: {response.text}")
        return time.monotonic() - started

    with ThreadPoolExecutor(len(bodies)) as clients:
        return dict(zip(bodies, clients.map(post, bodies.values()), strict=True))


def measure(
    url: str, bodies: dict[str, Body]
) -> tuple[tuple[float, float], dict[str, float], list[float]]:
    """When it was (monotonic seconds), the answers' seconds, and those of each /health."""
    context = get_context("spawn")
    stop = context.Event()
    receiver, sender = context.Pipe(duplex=False)
    poller = context.Process(target=poll, args=(url, stop, sender))
    poller.start()
    try:
        receiver.recv()  # its first word: it has begun
        started = time.monotonic()
        answers = send(url, bodies)
        window = started, time.monotonic()
    finally:
        stop.set()
    waits: list[float] = receiver.recv()
    poller.join()
    return window, answers, waits


def poll(url: str, stop: Any, sender: Any) -> None:
    """A process of its own, which no body that is sent holds up."""
    address = url.removeprefix("http://")
    sender.send("begun")
    waits: list[float] = []
    while not stop.is_set():
        started = time.monotonic()
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("GET", "/health")
        connection.getresponse().read()
        connection.close()
        waits.append(time.monotonic() - started)
        time.sleep(max(0.0, POLL_SECONDS - waits[-1]))
    sender.send(waits)


@contextmanager
def file_server(folder: Path) -> Iterator[str]:
    """Serves the folder's files; yields its URL."""
    handler: Callable[..., Any] = partial(Quiet, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def read_delays(path: Path, window: tuple[float, float]) -> list[Delay]:
    """By how many seconds the task came late in the window, and how many of them the loop's thread
    computed: the latest first."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    inside = [(late, own) for due, late, own in lines if window[0] <= due <= window[1]]
    return sorted(inside, reverse=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("loop_hold", __doc__, engines=True)
    add = parser.add_argument
    add("--seconds", type=float, default=1200.0, help="of each song (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
