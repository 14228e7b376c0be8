"""Prompts and songs in, answers out: the way of a request between the wire and the engine."""

import asyncio
import contextlib
import dataclasses
import importlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from adapter import schemas
from adapter.admission import Door, Party, Turns
from adapter.audio import (
    AudioBase64,
    AudioLimits,
    AudioUpload,
    AudioUrl,
    Song,
    Songs,
    Source,
    cut,
)
from adapter.billing import Meter
from adapter.checkpoint import Checkpoint
from adapter.compat import Engines, Scheduler, Ticket
from adapter.decoder import DecoderPool
from adapter.engine import Engine
from adapter.errors import AdapterError, DeadlineExceededError, UnprocessableError
from adapter.grammar import to_grammar
from adapter.grammar_pool import GrammarPool
from adapter.keys import Client
from adapter.logs import current_request
from adapter.measure import Measured, Measurer, disputable, disputes
from adapter.metrics import Metrics, outcome_of
from adapter.prompting import Prompter
from adapter.quotas import Quotas
from adapter.reasoning import split_reasoning
from adapter.report import Report, error_content
from adapter.request import Clip, EngineRequest, FinishReason
from adapter.room import Room
from adapter.settings import Settings
from adapter.song_cache import SongCache
from adapter.streaming import PromptStream, Tell
from adapter.text_stream import TextStream
from adapter.usage import UsageLog, UsageRecord

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Asked:
    """One prompt of a request: what it asks, what it hears, and where it stands in the body."""

    prompt: schemas.PromptFields
    source: Source | None
    path: str  # "prompts.3." in a batch, "" alone
    grammar: str | None = None
    audio: schemas.AudioInfo | None = None
    num_audio_tokens: int = 0
    audio_seconds: float = 0.0
    accounted: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """What a start brings: the checkpoint, the engine, and why that one."""

    checkpoint: Checkpoint
    engine: Engine
    engine_reason: str


async def _as_it_is(_: int, answer: schemas.Answer) -> schemas.Answer:
    return answer


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The prompts of one request on their way; `complete` makes of an answer, by its index, what
    goes to the client."""

    asked: Sequence[_Asked]
    songs: Songs
    client: Client
    started_at: float
    tell: Tell | None = None
    complete: Callable[[int, schemas.Answer], Awaitable[schemas.Answer]] = _as_it_is


class Service:
    """Answers requests; the engine that does it may be another after a restart.

    `open` starts what needs an event loop; `close` ends the decoders.
    """

    def __init__(
        self,
        settings: Settings,
        started: Started,
        engines: Engines,
        *,
        meter: Meter,
        metrics: Metrics,
        usage_log: UsageLog,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._usage_log = usage_log
        self.checkpoint = started.checkpoint
        self.engine_name = started.engine.name
        self.engine_reason = started.engine_reason
        self.meter = meter
        self._prompter = Prompter(started.checkpoint)
        self.quotas = Quotas(
            max_prompts=settings.key_max_prompts,
            max_seconds_per_day=settings.key_max_seconds_per_day,
            used_today=usage_log.seconds_today(),
        )
        self.door = Door(max_num_seqs=settings.max_num_seqs, max_queued=settings.max_queued)
        self.scheduler = Scheduler(
            engines,
            meter,
            continuous=started.engine.continuous,
            max_num_seqs=settings.max_num_seqs,
            max_group_size=settings.max_group_size,
        )
        self._decoders = DecoderPool(
            settings.decoder_workers, max_audio_seconds=settings.max_audio_seconds
        )
        self._decoder_turns = Turns(settings.decoder_workers)
        self._grammars = GrammarPool(started.checkpoint.path, started.checkpoint.vocab_size)
        self._measurer = Measurer()
        self._song_room = Room("the decoded songs", settings.max_songs_bytes)
        forgets = settings.song_cache_bytes == 0 or settings.cache_scope == "request"
        self._song_cache = None if forgets else SongCache(settings.song_cache_bytes)
        self._audio_limits = AudioLimits(
            max_bytes=settings.max_audio_bytes,
            allowed_hosts=settings.allowed_audio_hosts,
            allow_private=settings.allow_private_audio_urls,
        )

    async def open(self) -> None:
        # It imports aiohttp: not with the application, which starts faster, and not on the loop.
        await asyncio.to_thread(importlib.import_module, "adapter.fetch")
        await self._decoders.start()

    async def close(self) -> None:
        await self._decoders.close()
        await self._grammars.close()
        await self._measurer.close()

    async def generate(
        self,
        prompt: schemas.GenerateRequest,
        upload: BinaryIO | None,
        client: Client,
        tell: Tell | None = None,
    ) -> schemas.Answer:
        """One prompt, one answer. Raises the prompt's own AdapterError where it has none.

        Here and below, `tell` is told what happens while it does, but for the end.
        """
        started_at = time.monotonic()
        asked = _Asked(prompt, _source(prompt, upload), path="")
        await self._make_grammars([asked])
        with self.quotas.admit(client.name, 1), self.door.admit(1):
            async with self._songs(client) as songs:
                run = _Run([asked], songs, client, started_at, tell)
                (ticket,) = await self._decode(run, None)
        if ticket.error is not None:
            error, ticket.error = ticket.error, None  # no cycle through this frame
            raise error
        return self._answer(asked, ticket, started_at)

    async def generate_batch(
        self,
        batch: schemas.GenerateBatchRequest,
        upload: BinaryIO | None,
        client: Client,
        tell: Tell | None = None,
    ) -> schemas.BatchAnswer:
        """Many prompts, an answer each.

        Raises AdapterError where the shared song cannot be had, and DeadlineExceededError where
        time ran out before any answer was finished.
        """
        started_at = time.monotonic()
        shared = _source(batch, upload)
        asked = [
            _Asked(prompt, _source(prompt, None) or shared, path=f"prompts.{index}.")
            for index, prompt in enumerate(batch.prompts)
        ]
        await self._make_grammars(asked)
        with self.quotas.admit(client.name, len(asked)), self.door.admit(len(asked)):
            async with self._songs(client) as songs:
                await self._load_shared(songs, asked, shared)
                run = _Run(asked, songs, client, started_at, tell)
                tickets = await self._decode(run, batch.group_size)
        answers = [
            self._answer(one, ticket, started_at)
            for one, ticket in zip(asked, tickets, strict=True)
        ]
        return schemas.BatchAnswer(answers=answers, **self._totals(answers, started_at))

    async def full_report(
        self,
        request: schemas.FullReportRequest,
        upload: BinaryIO | None,
        client: Client,
        tell: Tell | None = None,
    ) -> schemas.FullReport:
        """The sections of a report and what can be measured of the song; errors as in a batch."""
        started_at = time.monotonic()
        report = Report(request, self._settings)
        source = _source(request, upload)
        if source is None:
            raise UnprocessableError(
                "a report is about a song; send audio_url, audio or an uploaded part 'audio'",
                code="missing_field",
                field="audio",
            )
        asked = [
            _Asked(prompt, source, path=f"sections.{index}.")
            for index, prompt in enumerate(report.prompts)
        ]
        await self._make_grammars(asked)
        with self.quotas.admit(client.name, len(asked)), self.door.admit(len(asked)):
            async with self._songs(client, measure_loudness=True) as songs:
                song = await self._load_shared(songs, asked, source)
                assert song is not None
                async with self._measuring(song) as measured:

                    async def complete(index: int, answer: schemas.Answer) -> schemas.Section:
                        disputed = disputable(answer.data) and _disputed(answer, await measured)
                        return report.section(index, answer, disputed=disputed)

                    run = _Run(asked, songs, client, started_at, tell, complete)
                    tickets = await self._decode(run, request.group_size)
                    sections = [
                        await complete(index, self._answer(one, ticket, started_at))
                        for index, (one, ticket) in enumerate(zip(asked, tickets, strict=True))
                    ]
                    content = report.content(sections, _measured_content(await measured))
        return schemas.FullReport(
            report=content, sections=sections, **self._totals(sections, started_at)
        )

    async def _make_grammars(self, asked: Sequence[_Asked]) -> None:
        """Make the grammar of each prompt that has a schema. Raises UnprocessableError for the
        first that no engine should be given: before anything is queued."""
        for one in asked:
            if one.prompt.json_schema is None:
                continue
            try:
                one.grammar = await asyncio.to_thread(
                    to_grammar, one.prompt.json_schema, reasoning=self._prompter.reasoning
                )
                await self._grammars.check(one.grammar)
            except UnprocessableError as error:
                error.field = one.path + (error.field or "json_schema")
                raise

    def _songs(self, client: Client, *, measure_loudness: bool = False) -> Songs:
        return Songs(
            self._decoders,
            self._audio_limits,
            self._song_room,
            self._decoder_turns,
            party=Party(client.name or ""),
            cache=self._song_cache,
            owner=client.cache_key,
            measure_loudness=measure_loudness,
        )

    async def _load_shared(
        self, songs: Songs, asked: Sequence[_Asked], shared: Source | None
    ) -> Song | None:
        """Load the batch's song first: where it cannot be had, the whole request fails."""
        first = next((one for one in asked if one.source is shared), None)
        if shared is None or first is None:
            return None
        try:
            async with asyncio.timeout(self._settings.request_timeout_seconds):
                song = await self._load(songs, first, shared)
        except TimeoutError:
            raise DeadlineExceededError(
                "the song was not there in time; send a shorter one or the file itself"
            ) from None
        if self.checkpoint.num_audio_tokens(len(song.samples)) == 0:
            raise _too_short(song.duration_seconds, shared.field)
        return song

    @contextlib.asynccontextmanager
    async def _measuring(
        self, song: Song
    ) -> AsyncIterator["asyncio.Task[Measured | AdapterError]"]:
        """What is measured of a song meanwhile, or why it is not; ends with the block."""
        measuring = asyncio.create_task(self._measure(song))
        try:
            yield measuring
        finally:
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)

    async def _measure(self, song: Song) -> Measured | AdapterError:
        try:
            return await self._measurer.measure(song)
        except AdapterError as error:
            return error

    async def _decode(self, run: _Run, group_size: int | None) -> list[Ticket]:
        """The ended tickets of the prompts. Raises DeadlineExceededError as a batch does."""
        for one in run.asked:
            _check_moment_has_song(one)
        tickets = [Ticket(partial(self._make_request, run, one)) for one in run.asked]
        streams = self._listen(run, tickets)
        passed_seconds = time.monotonic() - run.started_at
        try:
            await self.scheduler.run(
                tickets,
                group_size=group_size,
                timeout_seconds=self._settings.request_timeout_seconds - passed_seconds,
                party=Party(run.client.name or ""),
            )
            _raise_if_nothing_finished(tickets)
            for stream in streams:
                await stream.wait()
        finally:
            # Also for a client that has left.
            await self._account(list(zip(run.asked, tickets, strict=True)), run.client)
            for stream in streams:
                await stream.cancel()
            for ticket in tickets:
                ticket.request = None  # whatever keeps a ticket for a while keeps no song
        return tickets

    def _listen(self, run: _Run, tickets: Sequence[Ticket]) -> list[PromptStream]:
        """Have what happens to the tickets told, where somebody wants to know."""
        if run.tell is None:
            return []
        streams = []
        for index, (one, ticket) in enumerate(zip(run.asked, tickets, strict=True)):
            text = TextStream(self._decoder(one), opened=self._prompter.opens_reasoning)
            finish = partial(self._finish, run, index, ticket)
            ticket.listener = PromptStream(index, text, run.tell, finish)
            streams.append(ticket.listener)
        return streams

    async def _finish(self, run: _Run, index: int, ticket: Ticket) -> schemas.Answer | None:
        """The answer of a prompt that has ended, once its record is kept."""
        asked = run.asked[index]
        if ticket.error is not None and not asked.path:
            return None
        await self._account([(asked, ticket)], run.client)
        return await run.complete(index, self._answer(asked, ticket, run.started_at))

    async def _account(self, prompts: Sequence[tuple[_Asked, Ticket]], client: Client) -> None:
        """Tell the metrics and the usage log, once, what each prompt came to, before its answer
        goes."""
        records = []
        for one, ticket in prompts:
            if one.accounted:
                continue
            one.accounted = True
            self.quotas.spend(client.name, ticket.elapsed_seconds)
            self._metrics.prompt_ended(
                outcome_of(ticket.outcome),
                elapsed_seconds=ticket.elapsed_seconds,
                cost_usd=ticket.elapsed_seconds * self._settings.rate_usd_per_second,
                queue_seconds=ticket.queue_seconds if ticket.entered else None,
                heard_seconds=one.audio.heard_seconds if one.audio else 0.0,
                prompt_tokens=ticket.prompt_tokens,
                cached_tokens=ticket.cached_tokens,
                completion_tokens=len(ticket.token_ids),
            )
            if ticket.request is not None and ticket.entered:
                records.append(self._usage_record(ticket.request, ticket, client))
        await self._usage_log.write(records)

    def _usage_record(self, request: EngineRequest, ticket: Ticket, client: Client) -> UsageRecord:
        http_request = current_request()
        return UsageRecord(
            request_id=request.request_id,
            http_request_id=http_request.id if http_request else "",
            key_name=client.name,
            model=self.checkpoint.name,
            revision=self.checkpoint.revision,
            engine=self.engine_name,
            prompt_tokens=ticket.prompt_tokens,
            completion_tokens=len(ticket.token_ids),
            cached_tokens=ticket.cached_tokens,
            audio_tokens=request.num_audio_tokens,
            elapsed_seconds=ticket.elapsed_seconds,
            gpu_usd_per_second=self._settings.rate_usd_per_second,
            cost_usd=ticket.elapsed_seconds * self._settings.rate_usd_per_second,
            outcome=ticket.outcome,
        )

    async def _make_request(self, run: _Run, asked: _Asked) -> EngineRequest:
        """The engine's request for one prompt. Raises the AdapterError of whatever is wrong."""
        clip = None
        if asked.source is not None:
            clip = await self._hear(run.songs, asked, asked.source, run.client)
        prompt = asked.prompt
        token_ids = await asyncio.to_thread(
            self._prompter.encode, prompt.prompt, with_audio=clip is not None
        )
        sampling = prompt.to_sampling()
        room = self._room(token_ids, asked)
        return EngineRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            clip=clip,
            num_audio_tokens=asked.num_audio_tokens,
            cache_salt=run.client.cache_salt,
            stream=run.tell is not None,
            sampling=dataclasses.replace(
                sampling,
                max_new_tokens=min(sampling.max_new_tokens, room),
                grammar=asked.grammar,
            ),
        )

    async def _hear(self, songs: Songs, asked: _Asked, source: Source, client: Client) -> Clip:
        song = await self._load(songs, asked, source)
        clip = cut(
            song,
            start_seconds=asked.prompt.start_seconds,
            end_seconds=asked.prompt.end_seconds,
            max_seconds=self.checkpoint.max_clip_seconds(),
            audible=self.checkpoint.audible_samples,
            key=client.cache_key,
        )
        asked.num_audio_tokens = self.checkpoint.num_audio_tokens(len(clip.samples))
        if asked.num_audio_tokens == 0:
            prompt = asked.prompt
            moment = "start_seconds" if prompt.end_seconds is None else "end_seconds"
            whole = prompt.start_seconds is None and prompt.end_seconds is None
            raise _too_short(clip.heard_seconds, source.field if whole else moment)
        asked.audio = _audio_info(clip)
        return clip

    async def _load(self, songs: Songs, asked: _Asked, source: Source) -> Song:
        loaded = await songs.load(source)
        if loaded.audio_seconds:  # 0 where another prompt did it
            asked.audio_seconds = loaded.audio_seconds
            self._metrics.song_loaded(loaded.song.duration_seconds)
        return loaded.song

    def _room(self, token_ids: Sequence[int], asked: _Asked) -> int:
        """The tokens that the context has left for an answer."""
        num_tokens = len(token_ids)
        if asked.num_audio_tokens:
            num_tokens += asked.num_audio_tokens - 1 + self.checkpoint.num_boundary_tokens
        room = self.checkpoint.context_tokens - num_tokens
        if room < 1:
            raise UnprocessableError(
                f"the prompt has {num_tokens} tokens with its audio and the context holds "
                f"{self.checkpoint.context_tokens}; shorten the text or choose a moment",
                code="prompt_too_long",
                field="prompt",
            )
        return room

    def _answer(self, asked: _Asked, ticket: Ticket, started_at: float) -> schemas.Answer:
        failed = ticket.error is not None
        reasoning, response = (None, "") if failed else self._split(asked, ticket.token_ids)
        data, incomplete = None, None
        if asked.grammar is not None and not failed:
            data, incomplete = _parsed(response, ticket.finish_reason)
        return schemas.Answer(
            response=response,
            reasoning=reasoning,
            data=data,
            error=_answer_error(ticket.error or incomplete, asked.path),
            finish_reason=None if failed else ticket.finish_reason,
            usage=schemas.Usage(
                prompt_tokens=ticket.prompt_tokens,
                completion_tokens=len(ticket.token_ids),
                cached_tokens=ticket.cached_tokens,
                audio_tokens=asked.num_audio_tokens,
            ),
            audio=asked.audio,
            elapsed_seconds=ticket.elapsed_seconds,
            cost_usd=ticket.elapsed_seconds * self._settings.rate_usd_per_second,
            gpu_usd_per_second=self._settings.rate_usd_per_second,
            rate_source=self._settings.rate_source,
            model=self.checkpoint.name,
            engine=self.engine_name,
            timings=schemas.Timings(
                audio_seconds=asked.audio_seconds,
                queue_seconds=ticket.queue_seconds,
                wall_seconds=(ticket.left_at or time.monotonic()) - started_at,
            ),
        )

    def _split(self, asked: _Asked, token_ids: Sequence[int]) -> tuple[str | None, str]:
        text = self._decoder(asked)(token_ids)
        return split_reasoning(text, opened=self._prompter.opens_reasoning)

    def _decoder(self, asked: _Asked) -> Callable[[Sequence[int]], str]:
        return self._prompter.decode if asked.grammar is None else self._prompter.decode_all

    def _totals(self, answers: Sequence[schemas.Answer], started_at: float) -> dict[str, Any]:
        """The fields of `schemas.Billed` for all answers of a request."""
        return {
            "elapsed_seconds": sum(answer.elapsed_seconds for answer in answers),
            "cost_usd": sum(answer.cost_usd for answer in answers),
            "gpu_usd_per_second": self._settings.rate_usd_per_second,
            "rate_source": self._settings.rate_source,
            "model": self.checkpoint.name,
            "engine": self.engine_name,
            "timings": schemas.Timings(
                audio_seconds=max(answer.timings.audio_seconds for answer in answers),
                queue_seconds=max(answer.timings.queue_seconds for answer in answers),
                wall_seconds=time.monotonic() - started_at,
            ),
        }


def _parsed(
    response: str, finish_reason: FinishReason | None
) -> tuple[object, UnprocessableError | None]:
    """The JSON of a response that was held to a grammar, or why it has none.

    A number that is all of a cut answer may be the beginning of another.
    """
    if finish_reason == "stop" or not response[-1:].isdigit():
        with contextlib.suppress(ValueError):
            return json.loads(response), None
    advice = "raise max_new_tokens, or bound strings and lists in the schema more tightly"
    if finish_reason == "repetition":
        advice = "the answer repeated itself; ask otherwise, or without stop_on_repetition"
    return None, UnprocessableError(
        f"the answer ended before its JSON was complete; {advice}", code="incomplete_json"
    )


def _disputed(answer: schemas.Answer, measured: Measured | AdapterError) -> bool:
    return isinstance(measured, Measured) and disputes(answer.data, measured)


def _measured_content(measured: Measured | AdapterError) -> dict[str, Any]:
    if isinstance(measured, AdapterError):
        return error_content(measured)
    return dataclasses.asdict(measured)


def _too_short(heard_seconds: float, field: str) -> UnprocessableError:
    return UnprocessableError(
        f"the prompt would hear {heard_seconds:g} s, less than one audio token; let it hear at "
        "least 0.04 s",
        code="audio_too_short",
        field=field,
    )


def _source(fields: schemas.AudioSource, upload: BinaryIO | None) -> Source | None:
    if upload is not None:
        return AudioUpload(upload)
    if fields.audio is not None:
        return AudioBase64(fields.audio)
    if fields.audio_url is not None:
        return AudioUrl(fields.audio_url)
    return None


def _check_moment_has_song(asked: _Asked) -> None:
    for field in ("start_seconds", "end_seconds"):
        if asked.source is None and getattr(asked.prompt, field) is not None:
            raise UnprocessableError(
                f"{field} chooses a part of a song, but this prompt hears none; send audio_url or "
                "audio, or leave it out",
                code="moment_without_audio",
                field=asked.path + field,
            )


def _raise_if_nothing_finished(tickets: Sequence[Ticket]) -> None:
    errors = [ticket.error for ticket in tickets]
    late = next((error for error in errors if isinstance(error, DeadlineExceededError)), None)
    if late is not None and all(error is not None for error in errors):
        raise late


def _answer_error(error: AdapterError | None, path: str) -> schemas.AnswerError | None:
    if error is None:
        return None
    field = path + error.field if error.field else None
    return schemas.AnswerError(code=error.code, message=error.message, field=field)


def _audio_info(clip: Clip) -> schemas.AudioInfo:
    return schemas.AudioInfo(
        duration_seconds=clip.duration_seconds,
        start_seconds=clip.start_seconds,
        heard_seconds=clip.heard_seconds,
        truncated=clip.truncated,
    )
