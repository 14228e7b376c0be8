"""HTTP connections that cannot be held open for nothing, in front of uvicorn's own handling.

uvicorn sets no limit on the time until a request's head is there
(https://www.uvicorn.org/settings/#timeouts): a client that sends nothing, or a letter a minute,
would hold a connection for ever. Its answer to what is no HTTP is plain text; ours has the form of
every error.
"""

import asyncio
import json
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0  # for a request's head to arrive, and for the rest of a body that nobody reads
MAX_OPEN_FILES = 65_536

_NOT_HTTP = {
    "error": {
        "code": "invalid_http",
        "message": "this is no HTTP/1.1 request that can be read; let an HTTP client build it",
        "field": None,
    }
}


class Connection(H11Protocol):
    """Ends when it has asked nothing for `HEAD_SECONDS`. Where there are too many, an idle one
    gives way to a new one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._end_of_patience: asyncio.TimerHandle | None = None
        self._max_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > self._max_connections:
            others = (one for one in self.connections if one is not self)
            idle = (one for one in others if isinstance(one, Connection) and not one.busy)
            next(idle, self).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.busy:
            self._stop_waiting()
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # in the middle of an answer
            return
        body = json.dumps(_NOT_HTTP).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_head(self) -> None:
        if self._end_of_patience is None:
            self._end_of_patience = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._end_of_patience is not None:
            self._end_of_patience.cancel()
            self._end_of_patience = None

    def _give_up(self) -> None:
        if not self.busy:
            self.transport.abort()


def allow_many_connections() -> None:
    """Raise this process's limit on open files, which is 1024 on many systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
