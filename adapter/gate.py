"""Whether requests are let in, and who is inside: how a server ends without losing answers."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from adapter.errors import UnavailableError


class Gate:
    """Open until `drain`; `cut` also sends away those who are inside."""

    def __init__(self) -> None:
        self._inside: set[asyncio.Task[Any]] = set()
        self._draining = False
        self._cut = False

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    def drain(self) -> None:
        """Let nobody in any more; those inside may finish."""
        self._draining = True

    def cut(self) -> None:
        """Cancel the requests that are inside; each is answered with 503."""
        self._draining = self._cut = True
        for task in self._inside:
            task.cancel()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """The block is one request's, in a task of its own.

        Raises UnavailableError of code `draining` where the gate is closed, or closes on it.
        """
        if self._draining:
            raise _unavailable("the server is stopping and takes no new requests")
        task = asyncio.current_task()
        assert task is not None
        self._inside.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._cut:
                raise
            task.uncancel()
            raise _unavailable("the server was stopped before the answer was there") from None
        finally:
            self._inside.discard(task)


def _unavailable(why: str) -> UnavailableError:
    return UnavailableError(f"{why}; send the request again in a moment", code="draining")
