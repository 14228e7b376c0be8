"""The log: one line for each request that asks for answers, without what it asked.

`RequestLog` is the outermost layer of the application. It gives a request its id, has it sent back
with every response, and is the last border for what nobody expected.
"""

import json
import logging
import re
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

LogFormat = Literal["text", "json"]
REQUEST_ID_HEADER = b"x-request-id"
CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody is there to read it

_SANE_ID = re.compile(rb"[!-~]{1,128}")
_BARE = re.compile(r"[\w.:/+-]+", re.ASCII)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What is noted of one request while it lasts; a number of seconds is the sum over prompts,
    but `queue_seconds` the longest wait. `route` is the path as declared, never as sent."""

    id: str
    route: str = "other"
    key_name: str | None = None
    status: int = CLIENT_CLOSED_REQUEST
    num_prompts: int = 0
    audio_seconds: float = 0.0
    queue_seconds: float = 0.0
    engine_seconds: float = 0.0
    cost_usd: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    replayed: bool = False
    wall_seconds: float = 0.0

    def fields(self) -> dict[str, object]:
        """What a log line says, in its order."""
        return {
            "request_id": self.id,
            "route": self.route,
            "key": self.key_name,
            "status": self.status,
            "prompts": self.num_prompts,
            "audio_seconds": round(self.audio_seconds, 3),
            "queue_seconds": round(self.queue_seconds, 6),
            "engine_seconds": round(self.engine_seconds, 6),
            "cost_usd": round(self.cost_usd, 9),
            **{f"prompts_{outcome}": count for outcome, count in sorted(self.outcomes.items())},
            "replayed": self.replayed,
            "wall_seconds": round(self.wall_seconds, 6),
        }


_current: ContextVar[RequestRecord | None] = ContextVar("adapter_request", default=None)


def current_request() -> RequestRecord | None:
    """The record of the request that this code works for, also in the tasks that it started."""
    return _current.get()


class RequestLog:
    """ASGI: the id, the line, and the answer to a fault.

    `ended` is told of every request at its end, `fault` makes the answer to an exception that
    nobody caught.
    """

    def __init__(
        self, app: ASGIApp, *, ended: Callable[[RequestRecord], None], fault: Callable[[], Response]
    ) -> None:
        self._app = app
        self._ended = ended
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope))
        began = time.monotonic()
        token = _current.set(record)
        try:
            await self._answer(record, scope, receive, send)
        finally:
            _current.reset(token)
            record.wall_seconds = time.monotonic() - began
            record.route = getattr(scope.get("route"), "path", record.route)
            self._ended(record)
            level = logging.INFO if scope["method"] == "POST" else logging.DEBUG
            fields = record.fields()
            logger.log(level, "request %s", _pairs(fields), extra={"fields": fields})

    async def _answer(
        self, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                id_header = (REQUEST_ID_HEADER, record.id.encode())
                message = {**message, "headers": [*message.get("headers", ()), id_header]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            # The last border, and no message: it may quote what the client sent.
            logger.error("request %s met a fault:\n%s", record.id, _without_messages(error))
            if started:
                raise ConnectionAbortedError("a fault broke the answer off") from None
            await self._fault()(scope, receive, send_with_id)


def configure(level: str, log_format: LogFormat) -> None:
    """Log to stderr, once for the process; `level` ("info") is ours and uvicorn's.

    Other libraries stay at info at least: their debug lines may hold anything.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TEXT)
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler])
    for name in ("adapter", "uvicorn"):
        logging.getLogger(name).setLevel(number)
    # httpx, which asks the model hub, says every URL with its query.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # uvicorn's own line for each request would say it twice, and shows query strings.
    access = logging.getLogger("uvicorn.access")
    access.handlers.clear()
    access.propagate = False


_TEXT = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


class _JsonFormatter(logging.Formatter):
    """One JSON object a line; a request's line has its fields in place of a message."""

    def format(self, record: logging.LogRecord) -> str:
        request = current_request()
        moment = datetime.fromtimestamp(record.created, UTC)
        entry: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        if fields is None:
            entry["message"] = record.getMessage()
            if request is not None:
                entry["request_id"] = request.id
        else:
            entry.update(fields)
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _request_id(scope: Scope) -> str:
    """The client's id where it sent one that can stand in a log; else one of ours."""
    sent = [value for name, value in scope["headers"] if name == REQUEST_ID_HEADER]
    if len(sent) == 1 and _SANE_ID.fullmatch(sent[0]):
        return str(sent[0], "ascii")
    return uuid.uuid4().hex


def _pairs(fields: Mapping[str, object]) -> str:
    known = {name: value for name, value in fields.items() if value is not None}
    return " ".join(f"{name}={_plain(value)}" for name, value in known.items())


def _plain(value: object) -> str:
    """A number as it is; a text with anything unusual in it in quotes."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _without_messages(error: BaseException) -> str:
    """The tracebacks of an exception and of those behind it, with types alone."""
    lines: list[str] = []
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        seen.add(id(behind))
        kind = type(behind)
        frames = traceback.format_tb(behind.__traceback__)
        lines = [*frames, f"{kind.__module__}.{kind.__qualname__} (message not logged)\n", *lines]
        if isinstance(behind, BaseExceptionGroup):
            lines += [_without_messages(one) for one in behind.exceptions]
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)
    return "".join(lines).rstrip()
