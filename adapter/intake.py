"""The bodies that are on their way or held: how much all of them are, and how slow one may be."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

from adapter.errors import RequestTimeoutError
from adapter.room import Room

MIN_BYTES_PER_SECOND = 16 * 1024


class Intake:
    """Bounds what all requests hold of their bodies, and the time that one takes to arrive.

    A body may be `timeout_seconds` late, where 16 KiB are due in each second, and take no more than
    `max_seconds` in all.
    """

    def __init__(self, *, max_bytes: int, timeout_seconds: float, max_seconds: float) -> None:
        self._room = Room("the bodies", max_bytes)
        self._timeout_seconds = timeout_seconds
        self._max_seconds = max_seconds

    @property
    def held_bytes(self) -> int:
        return self._room.held_bytes

    @contextmanager
    def body(self, receive: Receive) -> Iterator[Receive]:
        """What to receive one request's body with; what came counts until the block ends.

        It raises RequestTimeoutError where the body is too slow, and UnavailableError (code
        `queue_full`) where all bodies together are too large.
        """
        began = due_at = time.monotonic()  # due_at: when the next byte is due
        received_bytes = 0

        async def limited() -> Message:
            nonlocal due_at, received_bytes
            ends_at = min(due_at + self._timeout_seconds, began + self._max_seconds)
            try:
                async with asyncio.timeout(ends_at - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeoutError(
                    f"only {received_bytes} bytes of the body came in "
                    f"{time.monotonic() - began:.0f} s; send it faster, or give an audio_url"
                ) from None
            num_bytes = len(message.get("body", b""))
            if num_bytes:
                self._room.take(num_bytes)
            received_bytes += num_bytes
            # Nobody gets ahead of the clock: a body that stops has no more time than a new one.
            due_at = min(due_at + num_bytes / MIN_BYTES_PER_SECOND, time.monotonic())
            return message

        try:
            yield limited
        finally:
            self._room.give_back(received_bytes)
