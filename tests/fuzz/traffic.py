"""Requests as bytes, what must be true of every answer, and many of them at once."""

import asyncio
import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from pydantic import BaseModel, ValidationError

from adapter.schemas import Answer, BatchAnswer, ErrorResponse, FullReport

HANG_SECONDS = 90
NUM_CLIENTS = 6
RAW = "RAW"  # in place of a method: the content is all that goes through the socket
EXPECTED = {200, 400, 404, 405, 413, 415, 422}
EXPECTED_OF_ANSWERS = {502, 503, 504}  # only where something is asked of the engine or of a URL
# Nothing that a client sends may have them as a consequence, also in an answer of a batch.
TROUBLE = re.compile(
    rb'"code":"(engine_error|out_of_memory|engine_dead|engine_crashed|internal_error|'
    rb'deadline_exceeded)"'
)
ANSWERS: dict[str, type[BaseModel]] = {
    "/generate": Answer,
    "/generate_batch": BatchAnswer,
    "/full_report": FullReport,
}
EVENTS = re.compile(
    rb"(event: (delta|restart|answer)\ndata: .+\n\n|: .+\n\n)+event: done\ndata: .+\n\n"
)


@dataclass(frozen=True)
class Request:
    """One HTTP request; `headers` in order, as bytes, since the odd ones are no text."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    content: bytes

    def to_json(self) -> str:
        headers = [
            [name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers
        ]
        body = base64.b64encode(self.content).decode()
        fields = {"method": self.method, "path": self.path, "headers": headers, "content": body}
        return json.dumps(fields, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Request":
        fields = json.loads(text)
        headers = tuple((n.encode("latin-1"), v.encode("latin-1")) for n, v in fields["headers"])
        content = base64.b64decode(fields["content"])
        return cls(fields["method"], fields["path"], headers, content)


def json_request(path: str, body: object, *headers: tuple[bytes, bytes]) -> Request:
    content = json.dumps(body).encode()
    return Request("POST", path, ((b"Content-Type", b"application/json"), *headers), content)


def upload_request(path: str, body: object, song: bytes) -> Request:
    """The same call as a form, with the song as its part `audio`."""
    form = httpx.Request(
        "POST",
        "http://form" + path,
        files={
            "request": (None, json.dumps(body), "application/json"),
            "audio": ("song.mp3", song, "audio/mpeg"),
        },
    )
    return Request("POST", path, ((b"Content-Type", _type(form)),), form.read())


def _type(request: httpx.Request) -> bytes:
    return request.headers["content-type"].encode()


def fault(request: Request, response: httpx.Response) -> str | None:
    """What is wrong with an answer, whatever was asked; None where nothing is."""
    status = response.status_code
    if status not in EXPECTED and not (status in EXPECTED_OF_ANSWERS and request.path in ANSWERS):
        return f"status {status}"
    if trouble := TROUBLE.search(response.content):
        return f"status {status} with {trouble[1].decode()}"
    if status == 503 and not response.headers.get("retry-after", "").isdigit():
        return "a 503 without Retry-After"
    if "x-request-id" not in response.headers and status != 400:
        return "no X-Request-Id"
    if request.method == "HEAD":
        return None
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return None if EVENTS.fullmatch(response.content) else "a stream without its end"
    model = ANSWERS.get(request.path) if status == 200 else ErrorResponse
    return _misshapen(model, response.content) if model else None


def _misshapen(model: type[BaseModel], content: bytes) -> str | None:
    try:
        model.model_validate_json(content)
    except ValidationError as error:
        return f"no {model.__name__}: {error.errors(include_input=False)[0]}"
    return None


@dataclass
class Tally:
    """What was answered: statuses by route, and the requests whose answer was at fault."""

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[tuple[str, Request]] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return self.statuses.total()

    def note(self, request: Request, status: str, wrong: str | None) -> None:
        self.statuses[_route(request.path), status] += 1
        if wrong:
            self.faults.append((wrong, request))

    def write_faults(self, folder: Path) -> None:
        """A file for each, which test_corpus.py replays once it is moved to corpus/."""
        folder.mkdir(parents=True, exist_ok=True)
        for _, request in self.faults:
            text = request.to_json()
            name = hashlib.sha256(text.encode()).hexdigest()[:12]
            (folder / f"{name}.json").write_text(text)


def _route(path: str) -> str:
    routes = ("bytes", *ANSWERS, "/presets", "/health", "/live", "/metrics", "/openapi.json")
    return path if path in routes else "other"


async def send_all(url: str, requests: Iterable[Request], tally: Tally) -> None:
    """Send them from several clients at once, and judge each answer."""
    waiting = iter(requests)
    async with httpx.AsyncClient(base_url=url, timeout=HANG_SECONDS) as http:
        await asyncio.gather(*(_client(http, waiting, tally) for _ in range(NUM_CLIENTS)))


async def _client(http: httpx.AsyncClient, waiting: Iterable[Request], tally: Tally) -> None:
    for request in waiting:
        try:
            response = await send(http, request)
        except httpx.TransportError as error:
            tally.note(request, type(error).__name__, f"no answer: {error!r}")
        else:
            tally.note(request, str(response.status_code), fault(request, response))


async def send(http: httpx.AsyncClient, request: Request) -> httpx.Response:
    return await http.request(
        request.method, request.path, headers=list(request.headers), content=request.content
    )
