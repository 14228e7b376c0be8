"""The batch API on an engine: windows, sampling groups, retries, and each prompt's time share.

vLLM batches by itself, so each prompt is a call of its own and `group_size` is a sliding window.
transformers decodes one call at a time, so `group_size` cuts groups of prompts that share what a
`generate()` call has just one of.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from adapter.admission import Party, Turns
from adapter.billing import Meter
from adapter.engine import Engine
from adapter.errors import (
    AdapterError,
    DeadlineExceededError,
    EngineCrashedError,
    EngineDeadError,
    EngineError,
    EngineOutOfMemoryError,
    UnavailableError,
)
from adapter.request import EngineOutput, EngineRequest, FinishReason, Sampling

logger = logging.getLogger(__name__)

T = TypeVar("T")

GATHER_SECONDS = 0.5  # how long ready prompts wait for others of their batch to share a call
TRANSFORMERS_GROUP_SIZE = 8  # where the request names none: what the stopgap decoded in one call


class Listener(Protocol):
    """Who wants to know what becomes of one prompt while it does."""

    def said(self, token_ids: Sequence[int]) -> None:
        """The answer goes on."""

    def started_over(self) -> None:
        """What was said so far does not count."""

    def ended(self) -> None:
        """The answer is whole and its share is written, or the input is at fault."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One prompt on its way: how its input is made, and what came of it.

    `elapsed_seconds` is the prompt's share of the engine's time over all its attempts, and
    `queue_seconds` the wait between its finished input and the engine's door. `made_at` and
    `left_at` are monotonic seconds, 0 where it never came so far.
    """

    make_request: Callable[[], Awaitable[EngineRequest]]
    listener: Listener | None = None
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
    def entered(self) -> bool:
        return self.left_at > 0

    @property
    def outcome(self) -> str:
        """How it ended: a finish reason, an error's code, or `aborted`."""
        if self.error is not None:
            return self.error.code
        return self.finish_reason or "aborted"

    @property
    def may_retry(self) -> bool:
        """True after a failure that was not the prompt's and that the engine outlived."""
        return isinstance(self.error, EngineError) and not isinstance(self.error, EngineDeadError)

    def start_over(self) -> None:
        """Forget what a failed attempt wrote; its time stays billed."""
        if self.listener and self.token_ids:
            self.listener.started_over()
        self.token_ids.clear()
        self.finish_reason = None
        self.error = None

    def add(self, output: EngineOutput) -> None:
        if output.starts_over:
            self.start_over()
        self.token_ids.extend(output.token_ids)
        if self.listener and output.token_ids:
            self.listener.said(output.token_ids)
        self.prompt_tokens = output.prompt_tokens
        self.cached_tokens = output.cached_tokens
        self.finish_reason = output.finish_reason


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A ticket with what the engine made of its request."""

    ticket: Ticket
    request_id: str
    prepared: Any


class Engines(Protocol):
    """Where the scheduler finds the engine that answers, and says when it has died."""

    async def running(self) -> Engine:
        """The engine; waits for one that starts. Raises UnavailableError where none will."""

    def report_death(self, engine: Engine) -> None:
        """The engine raised EngineDeadError; may be said more than once of one engine."""

    def note_answer(self) -> None:
        """A prompt was answered: the engine works."""


class Scheduler:
    """Brings tickets through the engine: at most `max_num_seqs` at a time in a continuous one, one
    call at a time in a static one, in turns that are fair between requests."""

    def __init__(
        self,
        engines: Engines,
        meter: Meter,
        *,
        continuous: bool,
        max_num_seqs: int,
        max_group_size: int,
    ) -> None:
        self._engines = engines
        self._meter = meter
        self._continuous = continuous
        self._default_group_size = min(TRANSFORMERS_GROUP_SIZE, max_group_size)
        self._max_num_seqs = max_num_seqs
        # A static engine has a call that runs and one that is ready: each holds its features.
        self.turns = Turns(max_num_seqs if continuous else 2)
        self._call = asyncio.Lock()
        self._suspects = asyncio.Lock()
        self._buried: Engine | None = None
        self._last_shares: dict[str, float] = {}  # of a dead engine's prompts, till each takes its

    async def run(
        self,
        tickets: Sequence[Ticket],
        *,
        group_size: int | None,
        timeout_seconds: float,
        party: Party,
    ) -> None:
        """Answer every ticket of a batch, or set its error. Cancelling stops the engine's work."""
        decode = self._decode_window if self._continuous else self._decode_groups
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                await decode(tickets, group_size, party)
        except TimeoutError:
            if not limit.expired():
                raise
            _fail(
                (ticket for ticket in tickets if not ticket.ended),
                DeadlineExceededError(
                    "the request's time was over before this answer was finished; "
                    "ask fewer prompts at once or lower max_new_tokens"
                ),
            )

    async def _decode_window(
        self, tickets: Sequence[Ticket], group_size: int | None, party: Party
    ) -> None:
        window = asyncio.Semaphore(group_size or len(tickets))
        async with asyncio.TaskGroup() as tasks:
            for ticket in tickets:
                tasks.create_task(self._decode_in_window(ticket, window, party))
        for ticket in tickets:
            if ticket.may_retry:
                logger.warning("retrying a prompt alone after: %s", ticket.error)
                await self._decode_group([ticket], party)

    async def _decode_in_window(
        self, ticket: Ticket, window: asyncio.Semaphore, party: Party
    ) -> None:
        if await _make(ticket):
            async with window:
                await self._decode_group([ticket], party)

    async def _decode_groups(
        self, tickets: Sequence[Ticket], group_size: int | None, party: Party
    ) -> None:
        size = min(group_size or self._default_group_size, self._max_num_seqs)
        making = {asyncio.create_task(_make(ticket)): ticket for ticket in tickets}
        try:
            while making:
                for group in sampling_groups(await _take_ready(making), size):
                    await self._decode_group(group, party)
        finally:
            for task in making:
                task.cancel()
            await asyncio.gather(*making, return_exceptions=True)

    async def _decode_group(self, tickets: Sequence[Ticket], party: Party) -> None:
        """One call; smaller ones after an error, down to one prompt."""
        try:
            await self._attempt(tickets, party)
        except EngineDeadError as error:
            logger.warning("the engine died under %d prompts: %s", len(tickets), error.message)
            await self._survive(tickets, party)
        except UnavailableError as error:
            if len(tickets) == 1 or not isinstance(error, EngineError):
                _fail(tickets, error)
                return
            logger.warning("splitting a group of %d after: %s", len(tickets), error.message)
            size = (len(tickets) + 1) // 2 if isinstance(error, EngineOutOfMemoryError) else 1
            for part in _cut(tickets, size):
                await self._decode_group(part, party)

    async def _survive(self, tickets: Sequence[Ticket], party: Party) -> None:
        """Try each prompt that a dead engine held on the next one, a suspect at a time: who is
        there when that dies too was the cause, and is not tried for ever."""
        for ticket in tickets:
            async with self._suspects:
                try:
                    await self._attempt([ticket], party)
                except EngineDeadError:
                    crashed = "the engine died twice on this prompt; change it or leave it out"
                    _fail([ticket], EngineCrashedError(crashed))
                except UnavailableError as error:
                    _fail([ticket], error)

    async def _attempt(self, tickets: Sequence[Ticket], party: Party) -> None:
        """One call to the engine, in its turn. Raises EngineError for the whole call, and
        UnavailableError where there is no engine any more."""
        # The turn comes first: between `prepare` and `generate` of a continuous engine nothing may
        # wait, or a prompt that leans on another's features would reach the engine before them.
        async with self.turns.turn(party):
            engine = await self._engines.running()
            calls = await self._prepare(engine, tickets)
            async with nullcontext() if self._continuous else self._call:
                await self._generate(engine, calls)

    async def _prepare(self, engine: Engine, tickets: Sequence[Ticket]) -> list[_Call]:
        """Have the engine make its inputs; a ticket whose input is at fault is failed alone."""
        waiting = (ticket for ticket in tickets if not ticket.ended or ticket.may_retry)
        calls = await asyncio.gather(*(_prepare_one(engine, ticket) for ticket in waiting))
        return [call for call in calls if call is not None]

    async def _generate(self, engine: Engine, calls: Sequence[_Call]) -> None:
        """One metered call to the engine: whoever is still inside at its end leaves then."""
        if not calls:
            return
        for call in calls:
            call.ticket.start_over()
        inside = {call.request_id: call.ticket for call in calls}
        self._meter.enter(list(inside))
        _note_entry(inside.values())
        outputs = engine.generate([call.prepared for call in calls])
        reading = asyncio.create_task(self._read(outputs, inside))
        try:
            await asyncio.wait([reading])
            reading.result()
        except EngineDeadError:
            self._bury(engine)
            raise
        finally:
            # Before the wait for the engine's step: a prompt leaves when its abort is issued.
            self._settle(inside)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await outputs.aclose()
        if not all(call.ticket.ended for call in calls):
            raise EngineError("the engine ended without an answer; send the prompt again")
        self._engines.note_answer()

    async def _read(
        self, outputs: AsyncGenerator[EngineOutput, None], inside: dict[str, Ticket]
    ) -> None:
        """Write outputs to their tickets; who has its answer leaves, but the rows of a static
        engine's call leave together."""
        async for output in outputs:
            self._meter.mark()
            ticket = inside[output.request_id]
            ticket.add(output)
            if ticket.ended and self._continuous:
                self._settle({output.request_id: inside.pop(output.request_id)})

    def _settle(self, inside: dict[str, Ticket]) -> None:
        """Write their shares to the tickets of those who leave."""
        alive = [request_id for request_id in inside if request_id not in self._last_shares]
        shares = dict(zip(alive, self._meter.leave(alive), strict=True)) if alive else {}
        now = time.monotonic()
        for request_id, ticket in inside.items():
            share_seconds = shares.get(request_id)
            if share_seconds is None:
                share_seconds = self._last_shares.pop(request_id)
            ticket.elapsed_seconds += share_seconds
            ticket.left_at = now
            if ticket.listener and ticket.finish_reason is not None:
                ticket.listener.ended()

    def _bury(self, engine: Engine) -> None:
        """Settle a dead engine's accounts, once, whichever of its prompts notices first."""
        if engine is self._buried:
            return
        self._buried = engine
        self._last_shares |= self._meter.die()
        self._engines.report_death(engine)


async def _prepare_one(engine: Engine, ticket: Ticket) -> _Call | None:
    assert ticket.request is not None
    try:
        prepared = await engine.prepare(ticket.request)
    except EngineDeadError:
        raise
    except AdapterError as error:
        _fail([ticket], error)
        return None
    return _Call(ticket, ticket.request.request_id, prepared)


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


async def _take_ready(making: dict[asyncio.Task[bool], Ticket]) -> list[Ticket]:
    """Take the tickets whose requests are made, once there are any; a prompt whose own song is slow
    does not hold up the others, which are usually ready together."""
    await asyncio.wait(making, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait(making, timeout=GATHER_SECONDS)
    done = [task for task in making if task.done()]
    return [ticket for task in done if (ticket := making.pop(task)) and task.result()]


async def _make(ticket: Ticket) -> bool:
    """Make the ticket's request; False where its own input is at fault."""
    try:
        ticket.request = await ticket.make_request()
    except AdapterError as error:
        _fail([ticket], error)
        if ticket.listener:
            ticket.listener.ended()
        return False
    ticket.made_at = time.monotonic()
    return True


def _note_entry(tickets: Iterable[Ticket]) -> None:
    now = time.monotonic()
    for ticket in tickets:
        ticket.queue_seconds = ticket.queue_seconds or now - ticket.made_at


def _fail(tickets: Iterable[Ticket], error: AdapterError) -> None:
    # Its frames hold songs and features, and the ticket itself: a cycle that would keep them.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    for ticket in tickets:
        ticket.error = error
