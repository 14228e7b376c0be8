"""Server-sent events: what becomes of a request's prompts, told while it does.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapter import schemas
from adapter.disconnect import while_connected
from adapter.errors import AdapterError
from adapter.text_stream import TextStream

HEARTBEAT_SECONDS = 10.0  # proxies end what says nothing for a minute, some for half of one
_HEARTBEAT = b": still at work\n\n"


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `data` is a line of JSON."""

    name: Literal["delta", "answer", "restart", "done", "error"]
    data: str

    def encode(self) -> bytes:
        return f"event: {self.name}\ndata: {self.data}\n\n".encode()


Tell = Callable[[Event], None]


def delta(index: int, text: str) -> Event:
    return Event("delta", json.dumps({"index": index, "text": text}))


def restart(index: int) -> Event:
    return Event("restart", json.dumps({"index": index}))


def answer(index: int, said: schemas.Answer) -> Event:
    return Event("answer", json.dumps({"index": index} | said.model_dump()))


def done(result: schemas.Billed) -> Event:
    """The totals: the body that is not streamed, without what the other events said."""
    totals = {*schemas.Billed.model_fields, "report"}
    return Event("done", result.model_dump_json(include=totals))


def failure(error: AdapterError) -> Event:
    body = schemas.ErrorBody(code=error.code, message=error.message, field=error.field)
    return Event("error", schemas.ErrorResponse(error=body).model_dump_json())


class PromptStream:
    """Tells of one prompt: its text as it comes, then its answer, once `finish` has made that.

    It is the listener of the prompt's ticket. `finish` returns None where there is no answer to
    tell, since the whole request fails with the prompt.
    """

    def __init__(
        self,
        index: int,
        text: TextStream,
        tell: Tell,
        finish: Callable[[], Coroutine[Any, Any, schemas.Answer | None]],
    ) -> None:
        self._index = index
        self._text = text
        self._tell = tell
        self._finish = finish
        self._ending: asyncio.Task[None] | None = None

    def said(self, token_ids: Sequence[int]) -> None:
        if piece := self._text.add(token_ids):
            self._tell(delta(self._index, piece))

    def started_over(self) -> None:
        self._text.start_over()
        self._tell(restart(self._index))

    def ended(self) -> None:
        self._ending = self._ending or asyncio.create_task(self._end())

    async def wait(self) -> None:
        """Until the answer is told, also one that nobody said had ended."""
        self.ended()
        assert self._ending is not None
        await self._ending

    async def cancel(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.gather(self._ending, return_exceptions=True)

    async def _end(self) -> None:
        said = await self._finish()
        if said is None:
            return
        rest = self._text.rest(said.response)
        if rest is None:  # of an answer that failed, or whose text turned out otherwise
            self._tell(restart(self._index))
        if text := said.response if rest is None else rest:
            self._tell(delta(self._index, text))
        self._tell(answer(self._index, said))


class EventStream(Response):
    """A response that goes out event by event; its work ends where the client leaves.

    The work tells events and returns what the totals are made of. Call `begin` first: what fails
    before the first event raises there, and is an ordinary error then.
    """

    media_type = "text/event-stream"

    def __init__(self, work: Callable[[Tell], Coroutine[Any, Any, schemas.Billed]]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._told: list[Event] = []
        self._news = asyncio.Event()
        self._working = asyncio.create_task(work(self._tell))
        self._working.add_done_callback(lambda _: self._news.set())
        self._held = ExitStack()

    async def begin(self) -> None:
        """Return with the first event. Raises what the work raised before any."""
        try:
            await self._news.wait()
        except asyncio.CancelledError:
            await self._stop()
            raise
        if not self._told:
            self._working.result()

    def hold(self, held: ExitStack) -> None:
        """What to let go of when the last event is sent, or nobody is left to read it."""
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        last = b""
        try:
            with self._held:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                await while_connected(receive, self._send_events(send))
        except ClientDisconnect:
            return
        except AdapterError as error:
            last = failure(error).encode()
        except Exception:
            fault = failure(AdapterError("the server has a fault; see its log")).encode()
            await send({"type": "http.response.body", "body": fault, "more_body": True})
            raise
        finally:
            await self._stop()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _tell(self, event: Event) -> None:
        self._told.append(event)
        self._news.set()

    async def _send_events(self, send: Send) -> None:
        while not self._working.done() or self._told:
            told, self._told = self._told, []
            self._news.clear()
            body = b"".join(event.encode() for event in told) or _HEARTBEAT
            await send({"type": "http.response.body", "body": body, "more_body": True})
            if not self._told and not self._working.done():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await self._news.wait()
        last = done(self._working.result()).encode()
        await send({"type": "http.response.body", "body": last, "more_body": True})

    async def _stop(self) -> None:
        self._working.cancel()
        await asyncio.gather(self._working, return_exceptions=True)
