"""HTTP connections that cannot be held open for nothing, in front of uvicorn's own handling.

uvicorn sets no limit on the time until a request's head is there, nor on the time that a client
takes to read (https://www.uvicorn.org/settings/#timeouts): a client that sends nothing, or reads
nothing, would hold a connection for ever. Its answer to what is no HTTP is plain text; ours has the
form of every error.
"""

import asyncio
import json
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 20.0  # for a request's head to arrive, and for the rest of a body that nobody reads
READ_SECONDS = 30.0  # for a client to read some of what waits for it
MAX_HEAD_BYTES = 64 * 1024
MAX_OPEN_FILES = 65_536

_ERROR = {
    "code": "invalid_http",
    "message": "this is no HTTP/1.1 request that can be read; let an HTTP client build it",
    "field": None,
}
_NOT_HTTP = json.dumps({"error": _ERROR}).encode()
_NOT_HTTP_HEAD = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n"
)


class Connection(HttpToolsProtocol):
    """Ends when it has asked nothing for `HEAD_SECONDS` or read nothing for `READ_SECONDS`. Where
    there are too many, one that is idle, or that does not read, gives way to a new one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def idle(self) -> bool:
        return not self.busy or self._read_timer is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > self._max_connections:
            others = (one for one in self.connections if one is not self)
            idle = (one for one in others if isinstance(one, Connection) and one.idle)
            next(idle, self).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.busy:
            self._stop_waiting()
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and self.cycle is None:
            self.send_400_response("")
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        if not self.busy:  # or it would stand in the middle of an answer
            self.transport.write(_NOT_HTTP_HEAD % len(_NOT_HTTP) + _NOT_HTTP)
        self.transport.close()

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.busy:
            self.transport.abort()


def allow_many_connections() -> None:
    """Raise this process's limit on open files, which is 1024 on many systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
