"""The real page over a scripted wire: what an engine cannot be made to say on command."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.routing import Mount

from adapter.page import add_page
from adapter.presets import built_in_presets
from tests.page.sample_report import ANSWERS, DISPUTED, MEASURED
from tests.server import free_port

RATE_USD_PER_SECOND = 0.000583
PRESETS = [dataclasses.asdict(preset) for preset in built_in_presets()]
TOTALS = {
    "gpu_usd_per_second": RATE_USD_PER_SECOND,
    "rate_source": "fallback",
    "model": "music-flamingo",
    "engine": "vllm",
    "timings": {"audio_seconds": 0.4, "queue_seconds": 0.0, "wall_seconds": 9.0},
}


class Break:
    """The connection breaks."""


@dataclass(frozen=True)
class Pause:
    seconds: float


class Hold:
    """The stream goes on when the test calls `release`."""

    def __init__(self) -> None:
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    async def wait(self) -> None:
        while not self._released.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Event:
    name: str
    data: dict[str, Any]

    def encode(self) -> bytes:
        return f"event: {self.name}\ndata: {json.dumps(self.data)}\n\n".encode()


Step = Event | Pause | Hold | Break


@dataclass(frozen=True)
class Asked:
    """A request as it came: its path, JSON, and the size of the file beside it."""

    path: str
    request: dict[str, Any]
    num_file_bytes: int | None
    authorization: str | None


Script = Callable[[Asked], Sequence[Step]]


@dataclass
class Wire:
    """What the server does, for a test to change, and what it was asked."""

    script: Script = lambda asked: whole_report(asked)
    refusal: Response | None = None
    key: str | None = None
    asked: list[Asked] = field(default_factory=list)
    num_open: int = 0
    url: str = ""


def delta(index: int, text: str) -> Event:
    return Event("delta", {"index": index, "text": text})


def restart(index: int) -> Event:
    return Event("restart", {"index": index})


def answer(index: int, said: Any, **fields: Any) -> Event:
    """An answer of one billed second; `said` is its text or its data."""
    is_text = isinstance(said, str)
    whole = {
        "index": index,
        "response": said if is_text else json.dumps(said),
        "reasoning": None,
        "data": None if is_text else said,
        "error": None,
        "finish_reason": "stop",
        "usage": {},
        "audio": None,
        "elapsed_seconds": 1.0,
        "cost_usd": RATE_USD_PER_SECOND,
    }
    return Event("answer", whole | TOTALS | fields)


def failure(index: int, code: str, message: str, response: str = "") -> Event:
    error = {"code": code, "message": message, "field": None}
    return answer(index, response, error=error, finish_reason=None)


def done(num_answers: int, report: dict[str, Any] | None = None) -> Event:
    totals = {"elapsed_seconds": 1.0 * num_answers, "cost_usd": RATE_USD_PER_SECOND * num_answers}
    return Event("done", totals | TOTALS | ({"report": report} if report else {}))


def preset_names(asked: Asked) -> list[str]:
    if asked.path == "/generate_batch":
        return [prompt["preset"] for prompt in asked.request["prompts"]]
    return list(asked.request.get("sections", []))


def whole_report(asked: Asked, pause_seconds: float = 0.0) -> list[Step]:
    """Every section: some deltas, then the answer; then the totals."""
    if asked.path == "/generate":
        return [
            delta(0, "A flute and "),
            delta(0, "a harp."),
            answer(0, "A flute and a harp."),
            done(1),
        ]
    keys = {preset["name"]: preset["report_key"] for preset in PRESETS}
    sections = [(name, keys[name], ANSWERS[keys[name]]) for name in preset_names(asked)]
    steps: list[Step] = []
    for index, (name, key, said) in enumerate(sections):
        steps += [delta(index, piece) for piece in pieces(said)]
        steps.append(Pause(pause_seconds))
        named = {"report_key": key, "preset": name, "disputed_by_measurement": key in DISPUTED}
        steps.append(answer(index, said, **(named if asked.path == "/full_report" else {})))
    report = {key: said for _, key, said in sections} | {"measured": MEASURED}
    return [*steps, done(len(sections), report if asked.path == "/full_report" else None)]


def pieces(said: Any) -> Iterator[str]:
    text = said if isinstance(said, str) else json.dumps(said)
    return (text[start : start + 24] for start in range(0, len(text), 24))


def fake_app(wire: Wire) -> Starlette:
    """The page and the scripted wire, at the root and below `/prefix`."""
    app = FastAPI()
    add_page(app)

    def refuse(request: Request) -> Response | None:
        if wire.key and request.headers.get("authorization") != f"Bearer {wire.key}":
            error = {"code": "unauthorized", "message": "this API key is not known", "field": None}
            return JSONResponse({"error": error}, 401)
        return None

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", **TOTALS}

    @app.get("/presets")
    def presets(request: Request) -> Response:
        return refuse(request) or JSONResponse({"presets": PRESETS})

    async def ask(request: Request) -> Response:
        asked = await read(request)
        wire.asked.append(asked)
        if refused := refuse(request) or wire.refusal:
            return refused
        return StreamingResponse(stream(wire, asked), media_type="text/event-stream")

    for path in ("/full_report", "/generate_batch", "/generate"):
        app.add_api_route(path, ask, methods=["POST"])
    return Starlette(routes=[Mount("/prefix", app), Mount("/", app)])


async def read(request: Request) -> Asked:
    path = "/" + request.url.path.rpartition("/")[2]
    authorization = request.headers.get("authorization")
    if request.headers["content-type"] == "application/json":
        return Asked(path, await request.json(), None, authorization)
    form = await request.form()
    text, file = form["request"], form["audio"]
    assert isinstance(text, str) and isinstance(file, UploadFile)
    return Asked(path, json.loads(text), file.size, authorization)


async def stream(wire: Wire, asked: Asked) -> AsyncIterator[bytes]:
    wire.num_open += 1
    try:
        yield b": here\n\n"
        for step in wire.script(asked):
            if isinstance(step, Event):
                yield step.encode()
            elif isinstance(step, Break):
                raise ConnectionError
            elif isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            else:
                await step.wait()
    finally:
        wire.num_open -= 1


def running_wire(wire: Wire) -> Iterator[Wire]:
    """Serves it from a thread, on a free port."""
    config = uvicorn.Config(
        fake_app(wire), port=free_port(), log_level="critical", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the fake server did not start"
        threading.Event().wait(0.01)
    wire.url = f"http://127.0.0.1:{config.port}/"
    yield wire
    server.should_exit = True
    thread.join()
