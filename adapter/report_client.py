"""Asks a server for the reports of songs: streams, waits where it is busy, tries again where a
connection breaks."""

import asyncio
import email.utils
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import aiohttp

from adapter.event_stream import Event, EventStream
from adapter.report_record import Record, report_record
from adapter.report_songs import Song, digest
from adapter.settings import CLIENT_KEY

PAUSES_SECONDS = (1.0, 2.0, 4.0)  # before each new try after a connection that broke
RETRY_AFTER_SECONDS = 5.0  # where a busy server does not say
PRESETS_SECONDS = 30.0
_BUSY = {429, 503}


class SongError(Exception):
    """Why a song has no report; the form is that of the server's errors."""

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.field = field

    def fields(self) -> dict[str, str | None]:
        return {"code": self.code, "message": self.message, "field": self.field}


class _BusyError(Exception):
    def __init__(self, error: SongError, retry_after_seconds: float) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_seconds = retry_after_seconds


class Watcher(Protocol):
    """Is told how a song gets on."""

    def begin(self) -> None:
        """A request goes out: of an earlier one nothing counts."""

    def answered(self, sections: Sequence[Record]) -> None:
        """These sections are there, those told before among them."""

    def wait(self, seconds: float, reason: str) -> None:
        """The song is asked again after so many seconds."""


@dataclass(frozen=True, slots=True)
class Options:
    """What every song is asked with; `timeout_seconds` is for a song, its waits and tries in it."""

    sections: Sequence[str] | None = None
    seed: int | None = None
    group_size: int | None = None
    timeout_seconds: float = 900.0

    def body(self) -> dict[str, Any]:
        fields = {"sections": self.sections, "seed": self.seed, "group_size": self.group_size}
        given = {name: value for name, value in fields.items() if value is not None}
        return {**given, "stream": True}


def open_session(key: str | None) -> aiohttp.ClientSession:
    """To be closed by the caller. Each song has its own clock, so the session has none but for
    making a connection."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
    )


class ReportClient:
    """Asks the server at `url`, which may have a path, with one set of options."""

    def __init__(self, session: aiohttp.ClientSession, url: str, options: Options) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._options = options

    async def preset_names(self) -> list[str] | None:
        """The names of the server's presets; None where it does not tell them."""
        timeout = aiohttp.ClientTimeout(total=PRESETS_SECONDS)
        try:
            async with self._session.get(f"{self._url}/presets", timeout=timeout) as response:
                body = await response.json()
                return [str(preset["name"]) for preset in body["presets"]]
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError):
            return None

    async def ask(self, song: Song, watcher: Watcher) -> Record:
        """The line of a song's report. Raises SongError where there is none."""
        seconds = self._options.timeout_seconds
        deadline = time.monotonic() + seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._ask(song, watcher, deadline)
        except TimeoutError:
            message = f"there was no report after {seconds:g} seconds; allow more with --timeout"
            raise SongError("timeout", message) from None
        except OSError as error:
            raise SongError("unreadable_file", f"{error.strerror}; check the file") from error

    async def _ask(self, song: Song, watcher: Watcher, deadline: float) -> Record:
        pauses_seconds = iter(PAUSES_SECONDS)
        while True:
            try:
                return await self._ask_once(song, watcher)
            except _BusyError as busy:
                error, pause_seconds = busy.error, busy.retry_after_seconds
                # Who has used up its day is told to come back in hours.
                give_up = time.monotonic() + pause_seconds >= deadline
            except (aiohttp.ClientError, ConnectionError) as broken:
                error = SongError("no_connection", f"{broken or type(broken).__name__}")
                pause_seconds = next(pauses_seconds, 0.0)
                give_up = not pause_seconds
            if give_up:
                raise error
            watcher.wait(pause_seconds, str(error))
            await asyncio.sleep(pause_seconds)

    async def _ask_once(self, song: Song, watcher: Watcher) -> Record:
        watcher.begin()
        with ExitStack() as files:
            sha256, body = await self._body(song, files)
            async with self._session.post(
                f"{self._url}/full_report", allow_redirects=False, **body
            ) as response:
                if response.status != 200:
                    await _refuse(response)
                if response.content_type != "text/event-stream":
                    message = f"the server sent {response.content_type}; does it know /full_report?"
                    raise SongError("unexpected_answer", message)
                answer = await _read_report(response, watcher)
        return report_record(song.name, sha256, self._options.sections, answer)

    async def _body(self, song: Song, files: ExitStack) -> tuple[str | None, dict[str, Any]]:
        """What is sent, and the SHA-256 of the file in it."""
        if song.path is None:
            return None, {"json": {**self._options.body(), "audio_url": song.name}}
        # By number: aiohttp would read the file's name, which may be no text.
        file = files.enter_context(os.fdopen(os.open(song.path, os.O_RDONLY), "rb"))
        sha256 = await asyncio.to_thread(digest, file)
        form = aiohttp.FormData()
        form.add_field("request", json.dumps(self._options.body()), content_type="application/json")
        # The bytes decide what it is; its name need not leave this machine.
        form.add_field("audio", file, filename="song", content_type="application/octet-stream")
        return sha256, {"data": form}


async def _refuse(response: aiohttp.ClientResponse) -> NoReturn:
    """Raises the error of an answer that is none."""
    error = _song_error(await response.text(errors="replace"), response.status)
    if response.status in _BUSY:
        raise _BusyError(error, _retry_after_seconds(response.headers.get("Retry-After", "")))
    if response.status == 401:
        hint = f"{error.message}; the key is read from the variable {CLIENT_KEY}"
        raise SongError(error.code, hint, error.field)
    raise error


def _song_error(text: str, status: int | None = None) -> SongError:
    """The error in a body or an event; a proxy's has no form that is known."""
    try:
        error = json.loads(text)["error"]
        return SongError(str(error["code"]), str(error["message"]), error.get("field"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        what = "sent an error" if status is None else f"answered with status {status}"
        return SongError(f"http_{status or 200}", f"the server {what} that cannot be read")


def _retry_after_seconds(header: str) -> float:
    """https://www.rfc-editor.org/rfc/rfc9110#name-retry-after: seconds, or a date."""
    if header.strip().isdecimal():
        return max(1.0, float(header))
    try:
        moment = email.utils.parsedate_to_datetime(header)
        return max(1.0, moment.timestamp() - time.time())
    except ValueError:
        return RETRY_AFTER_SECONDS


async def _read_report(response: aiohttp.ClientResponse, watcher: Watcher) -> Record:
    """The body that the same request without a stream would have got."""
    stream = EventStream()
    answers: dict[int, Record] = {}
    try:
        async for chunk in response.content.iter_any():
            for event in stream.feed(chunk):
                done = _note(event, answers, watcher)
                if done is not None:
                    return done
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        message = f"the server's stream cannot be read: {type(error).__name__}: {error}"
        raise SongError("unexpected_answer", message) from error
    raise aiohttp.ClientPayloadError("the stream ended before the report was done")


def _note(event: Event, answers: dict[int, Record], watcher: Watcher) -> Record | None:
    """Keeps an answer; returns the whole where the event is its end. Raises ValueError,
    LookupError and TypeError for what is none of the events, SongError for an error."""
    if event.name == "error":
        raise _song_error(event.data)
    if event.name not in ("answer", "restart", "done"):
        return None
    data = json.loads(event.data, parse_constant=_refuse_constant)
    if event.name == "done":
        return _whole(data, [answers[index] for index in sorted(answers)])
    if event.name == "restart":
        answers.pop(data["index"], None)
    else:
        answers[data["index"]] = {name: data[name] for name in data if name != "index"}
    watcher.answered(list(answers.values()))
    return None


def _whole(done: Record, sections: Sequence[Record]) -> Record:
    """A report in which nothing stands would never be asked again: it counts as an error."""
    if not isinstance(done["report"], dict):
        raise TypeError("its report is no object")
    errors = [section["error"] for section in sections]
    if errors and all(errors):
        raise _song_error(json.dumps({"error": errors[0]}))
    return {"report": done["report"], "sections": list(sections), **done}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
