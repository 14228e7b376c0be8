"""The batch API on an engine: windows, sampling groups, retries, and each prompt's time share.

vLLM batches by itself, so each prompt is a call of its own and `group_size` is a sliding window.
transformers decodes one call at a time, so `group_size` cuts groups of prompts that share what a
`generate()` call has just one of.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from adapter.billing import Meter
from adapter.engine import Engine
from adapter.errors import (
    AdapterError,
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    EngineOutOfMemoryError,
)
from adapter.request import EngineOutput, EngineRequest, FinishReason, Sampling

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRANSFORMERS_GROUP_SIZE = 8  # where the request names none: what the stopgap decoded in one call


@dataclass(slots=True, eq=False)
class Ticket:
    """One prompt on its way: how its input is made, and what came of it.

    `elapsed_seconds` is the prompt's share of the engine's time over all its attempts, and
    `queue_seconds` the wait between its finished input and the engine's door. `made_at` and
    `left_at` are monotonic seconds, 0 where it never came so far.
    """

    make_request: Callable[[], Awaitable[EngineRequest]]
    request: EngineRequest | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    elapsed_seconds: float = 0.0
    queue_seconds: float = 0.0
    error: AdapterError | None = None
    made_at: float = 0.0
    left_at: float = 0.0

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def may_retry(self) -> bool:
        """True after a failure that was not the prompt's and that the engine outlived."""
        return isinstance(self.error, EngineError) and not isinstance(self.error, EngineDeadError)

    def start_over(self) -> None:
        """Forget what a failed attempt wrote; its time stays billed."""
        self.token_ids.clear()
        self.finish_reason = None
        self.error = None

    def add(self, output: EngineOutput) -> None:
        self.token_ids.extend(output.token_ids)
        self.prompt_tokens = output.prompt_tokens
        self.cached_tokens = output.cached_tokens
        self.finish_reason = output.finish_reason


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A ticket with what the engine made of its request."""

    ticket: Ticket
    request_id: str
    prepared: Any


class Scheduler:
    """Brings tickets through one engine, at most `max_num_seqs` at a time."""

    def __init__(self, engine: Engine, meter: Meter, *, max_num_seqs: int) -> None:
        self._engine = engine
        self._meter = meter
        self._seats = asyncio.Semaphore(max_num_seqs)
        self._device = asyncio.Lock()

    async def run(
        self, tickets: Sequence[Ticket], *, group_size: int | None, timeout_seconds: float
    ) -> None:
        """Answer every ticket of a batch, or set its error. Cancelling stops the engine's work."""
        decode = self._decode_window if self._engine.continuous else self._decode_groups
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                await decode(tickets, group_size)
        except TimeoutError:
            if not limit.expired():
                raise
            _fail(
                (ticket for ticket in tickets if not ticket.ended),
                DeadlineExceededError(
                    f"the request's {timeout_seconds:g} seconds were over before this answer; "
                    "ask fewer prompts at once or lower max_new_tokens"
                ),
            )

    async def _decode_window(self, tickets: Sequence[Ticket], group_size: int | None) -> None:
        window = asyncio.Semaphore(group_size or len(tickets))
        async with asyncio.TaskGroup() as tasks:
            for ticket in tickets:
                tasks.create_task(self._decode_in_window(ticket, window))
        for ticket in tickets:
            if ticket.may_retry:
                logger.warning("retrying a prompt alone after: %s", ticket.error)
                await self._decode_alone(ticket)

    async def _decode_in_window(self, ticket: Ticket, window: asyncio.Semaphore) -> None:
        if await _make(ticket):
            async with window:
                await self._decode_alone(ticket)

    async def _decode_alone(self, ticket: Ticket) -> None:
        # The seat is taken first: between `prepare` and `generate` nothing may wait, or a prompt
        # that leans on another's features would reach the engine before them.
        async with self._seats:
            try:
                calls = await self._prepare([ticket])
                await self._generate(calls)
            except EngineError as error:
                _fail([ticket], error)

    async def _decode_groups(self, tickets: Sequence[Ticket], group_size: int | None) -> None:
        made = await asyncio.gather(*(_make(ticket) for ticket in tickets))
        ready = list(itertools.compress(tickets, made))
        for group in sampling_groups(ready, group_size or TRANSFORMERS_GROUP_SIZE):
            calls = await self._prepare(group)
            await self._decode_group(calls)

    async def _decode_group(self, calls: Sequence[_Call]) -> None:
        """One call; smaller ones after an error, down to one prompt."""
        try:
            async with self._device:
                await self._generate(calls)
        except EngineError as error:
            if len(calls) == 1 or isinstance(error, EngineDeadError):
                _fail((call.ticket for call in calls), error)
                return
            logger.warning("splitting a group of %d after: %s", len(calls), error.message)
            size = (len(calls) + 1) // 2 if isinstance(error, EngineOutOfMemoryError) else 1
            for part in _cut(calls, size):
                await self._decode_group(part)

    async def _prepare(self, tickets: Sequence[Ticket]) -> list[_Call]:
        """Have the engine make its inputs; a ticket whose input is at fault is failed alone."""
        calls = await asyncio.gather(*(self._prepare_one(ticket) for ticket in tickets))
        return [call for call in calls if call is not None]

    async def _prepare_one(self, ticket: Ticket) -> _Call | None:
        assert ticket.request is not None
        try:
            prepared = await self._engine.prepare(ticket.request)
        except AdapterError as error:
            _fail([ticket], error)
            return None
        return _Call(ticket, ticket.request.request_id, prepared)

    async def _generate(self, calls: Sequence[_Call]) -> None:
        """One metered call to the engine: whoever is still inside at its end leaves then."""
        if not calls:
            return
        for call in calls:
            call.ticket.start_over()
        inside = {call.request_id: call.ticket for call in calls}
        self._meter.enter(list(inside))
        _note_entry(inside.values())
        outputs = self._engine.generate([call.prepared for call in calls])
        reading = asyncio.create_task(self._read(outputs, inside))
        try:
            await asyncio.wait([reading])
            reading.result()
        finally:
            # Before the wait for the engine's step: a prompt leaves when its abort is issued.
            self._settle(inside)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await outputs.aclose()
        if not all(call.ticket.ended for call in calls):
            raise EngineError("the engine ended without an answer; send the prompt again")

    async def _read(
        self, outputs: AsyncGenerator[EngineOutput, None], inside: dict[str, Ticket]
    ) -> None:
        """Write outputs to their tickets; who has its answer leaves, but the rows of a static
        engine's call leave together."""
        async for output in outputs:
            ticket = inside[output.request_id]
            ticket.add(output)
            if ticket.ended and self._engine.continuous:
                self._settle({output.request_id: inside.pop(output.request_id)})

    def _settle(self, inside: dict[str, Ticket]) -> None:
        shares = self._meter.leave(list(inside))
        now = time.monotonic()
        for ticket, share_seconds in zip(inside.values(), shares, strict=True):
            ticket.elapsed_seconds += share_seconds
            ticket.left_at = now


def sampling_groups(tickets: Sequence[Ticket], group_size: int) -> list[list[Ticket]]:
    """Cut tickets into the calls of a static engine, in the order of their first prompts.

    A call's rows share their sampling and whether they hear audio; a sampled prompt with a seed is
    alone, since a call draws all its rows from one generator.
    """
    groups: dict[object, list[Ticket]] = {}
    for index, ticket in enumerate(tickets):
        groups.setdefault(_group_key(ticket, index), []).append(ticket)
    return [list(part) for group in groups.values() for part in _cut(group, group_size)]


def _group_key(ticket: Ticket, index: int) -> object:
    assert ticket.request is not None
    sampling, hears = ticket.request.sampling, ticket.request.clip is not None
    if not sampling.greedy and sampling.seed is not None:
        return index
    return (_drawn(sampling), sampling.repetition_penalty, hears)


def _drawn(sampling: Sampling) -> object:
    return None if sampling.greedy else (sampling.temperature, sampling.top_p)


def _cut(group: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (group[start : start + size] for start in range(0, len(group), size))


async def _make(ticket: Ticket) -> bool:
    """Make the ticket's request; False where its own input is at fault."""
    try:
        ticket.request = await ticket.make_request()
    except AdapterError as error:
        ticket.error = error
        return False
    ticket.made_at = time.monotonic()
    return True


def _note_entry(tickets: Iterable[Ticket]) -> None:
    now = time.monotonic()
    for ticket in tickets:
        ticket.queue_seconds = ticket.queue_seconds or now - ticket.made_at


def _fail(tickets: Iterable[Ticket], error: AdapterError) -> None:
    for ticket in tickets:
        ticket.error = error
