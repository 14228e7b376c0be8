"""A server that answers /full_report by a script, in a thread of the test's process."""

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

NAMES = ("catalog_metadata", "mood_tags", "song_description")
KEYS = {"catalog_metadata": "overview", "mood_tags": "mood", "song_description": "description"}
DATA: dict[str, Any] = {
    "overview": {"genre": "dub [red]techno\x1b[31m", "bpm": 124, "key": "F#", "mode": "minor"},
    "mood": {"tags": ["warm"]},
    "description": "A song.",
}


@dataclass
class FakeServer:
    """`script` says what comes of each request, the last of it of all further ones: a status, or
    "ok", "broken" (the connection, after one answer), "silent" (after one answer), "cut" (a stream
    that ends early), "page" (no stream), "error" (as an event), "failed" (one section), "nothing"
    (no section stands)."""

    script: Sequence[str] = ("ok",)
    url: str = ""
    key: str | None = None
    retry_after: str = "1"
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_left: int = 0  # requests whose client went away
    answering: threading.Event = field(default_factory=threading.Event)

    @property
    def songs(self) -> list[str]:
        """The SHA-256 or the URL of each song that was asked for."""
        return [request["song"] for request in self.requests]


@contextmanager
def fake_reports(
    *script: str, key: str | None = None, retry_after: str = "1"
) -> Iterator[FakeServer]:
    server = FakeServer(script or ("ok",), key=key, retry_after=retry_after)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(_application(server), handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _application(server: FakeServer) -> web.Application:
    async def presets(_: web.Request) -> web.Response:
        return web.json_response({"presets": [{"name": name} for name in NAMES]})

    async def full_report(request: web.Request) -> web.StreamResponse:
        asked, song = await _read(request)
        number = len(server.requests)
        server.requests.append({**asked, "song": song, "at": time.monotonic()})
        if server.key and request.headers.get("Authorization") != f"Bearer {server.key}":
            return _refuse(server, 401)
        act = server.script[min(number, len(server.script) - 1)]
        if act.isdecimal():
            return _refuse(server, int(act))
        if act == "page":
            return web.Response(text="<p>hello</p>", content_type="text/html")
        try:
            return await _stream(server, request, act, asked.get("sections") or NAMES)
        except asyncio.CancelledError:
            server.num_left += 1
            raise

    application = web.Application(client_max_size=2**26)
    application.router.add_get("/presets", presets)
    application.router.add_post("/full_report", full_report)
    return application


async def _read(request: web.Request) -> tuple[dict[str, Any], str]:
    if request.content_type == "application/json":
        asked = await request.json()
        return asked, asked["audio_url"]
    form = await request.post()
    asked, audio = form["request"], form["audio"]
    assert isinstance(asked, bytearray) and isinstance(audio, web.FileField)
    return json.loads(asked), hashlib.sha256(audio.file.read()).hexdigest()


def _refuse(server: FakeServer, status: int) -> web.Response:
    headers = {"Retry-After": server.retry_after} if status in (429, 503) else {}
    error = {"code": f"code_{status}", "message": "do [this]", "field": None}
    return web.json_response({"error": error}, status=status, headers=headers)


async def _stream(
    server: FakeServer, request: web.Request, act: str, names: Sequence[str]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b": a comment\n\n")
    if act == "error":
        error = {"code": "engine_dead", "message": "try again", "field": None}
        await response.write(_event("error", {"error": error}))
        return response
    answers = [_answer(name, failed=act == "nothing" or act == name) for name in names]
    await response.write(_event("delta", {"index": 0, "text": "{"}))
    await response.write(_event("restart", {"index": 0}))
    for index, answer in reversed(list(enumerate(answers))):  # in the order of their ends
        await response.write(_event("answer", {"index": index, **answer}))
        if act == "broken":
            assert request.transport is not None
            request.transport.abort()
            return response
        if act == "silent":
            server.answering.set()
            await asyncio.sleep(60)
    if act == "cut":
        return response
    report = {answer["report_key"]: _in_report(answer) for answer in answers}
    total = {
        "elapsed_seconds": 0.5 * len(answers),
        "cost_usd": 0.25 * len(answers),
        "model": "fake",
    }
    measured = {"duration_seconds": 61.0}
    await response.write(_event("done", {"report": {**report, "measured": measured}, **total}))
    return response


def _answer(name: str, *, failed: bool) -> dict[str, Any]:
    error = {"code": "incomplete_json", "message": "", "field": None}
    return {
        "report_key": KEYS[name],
        "preset": name,
        "response": "…",
        "data": None if failed else DATA[KEYS[name]],
        "error": error if failed else None,
        "audio": {"duration_seconds": 61.0},
        "elapsed_seconds": 0.5,
        "cost_usd": 0.25,
    }


def _in_report(answer: dict[str, Any]) -> Any:
    return {"error": answer["error"]} if answer["error"] else answer["data"]


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
