"""Who may come in, and whose turn it is: bounded, and fair between keys and between requests."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from adapter.errors import UnavailableError


@dataclass(frozen=True, slots=True, eq=False)
class Party:
    """A request whose prompts wait in one line; `key` names the client that sent it."""

    key: str = ""


class Door:
    """Lets in as many prompts as the engine's seats and the queue hold together."""

    def __init__(self, *, max_num_seqs: int, max_queued: int) -> None:
        self._limit = max_num_seqs + max_queued
        self._max_queued = max_queued
        self._num_inside = 0

    @property
    def num_inside(self) -> int:
        """Prompts that were let in and are not answered yet."""
        return self._num_inside

    @contextmanager
    def admit(self, num_prompts: int) -> Iterator[None]:
        """Raises UnavailableError where the prompts do not all fit."""
        if self._num_inside + num_prompts > self._limit:
            raise UnavailableError(
                f"the queue of {self._max_queued} prompts has no room for {num_prompts} more; "
                "try again in a few seconds",
                code="queue_full",
            )
        self._num_inside += num_prompts
        try:
            yield
        finally:
            self._num_inside -= num_prompts


@dataclass(slots=True, eq=False)
class _Lines:
    """The requests of one key that wait, in the order of their turns."""

    parties: dict[Party, deque[asyncio.Future[None]]] = field(default_factory=dict)


class Turns:
    """`capacity` turns at the engine. A free one goes to the next key, there to the next request,
    there to the prompt that has waited longest: a large batch does not hold up a single prompt."""

    def __init__(self, capacity: int) -> None:
        self._num_free = capacity
        self._keys: dict[str, _Lines] = {}

    @property
    def num_waiting(self) -> int:
        lines = (line for key in self._keys.values() for line in key.parties.values())
        return sum(not called.done() for line in lines for called in line)

    @asynccontextmanager
    async def turn(self, party: Party) -> AsyncIterator[None]:
        """Wait for a turn, and hold it for the block."""
        await self._wait(party)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, party: Party) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        called = asyncio.get_running_loop().create_future()
        lines = self._keys.setdefault(party.key, _Lines())
        lines.parties.setdefault(party, deque()).append(called)
        try:
            await called
        except asyncio.CancelledError:
            if called.done() and not called.cancelled():
                self._pass_on()  # the turn came in the moment of leaving
            raise

    def _pass_on(self) -> None:
        while (called := self._next()) is not None:
            if not called.done():
                called.set_result(None)
                return
        self._num_free += 1

    def _next(self) -> "asyncio.Future[None] | None":
        """Take the next who waits out of its line; its key and its request go to the end."""
        if not self._keys:
            return None
        key = next(iter(self._keys))
        lines = self._keys.pop(key)
        party = next(iter(lines.parties))
        line = lines.parties.pop(party)
        called = line.popleft()
        if line:
            lines.parties[party] = line
        if lines.parties:
            self._keys[key] = lines
        return called
