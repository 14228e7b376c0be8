"""Songs for prompts: from a URL, base64 or an upload to mono float32 at 16 kHz, and the cut.

Encoded bytes live in unnamed temporary files and samples in memory files: whatever ends the server,
nothing of a song stays behind.
"""

import asyncio
import binascii
import contextlib
import hashlib
import hmac
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Self

from adapter.admission import Party, Turns
from adapter.decoder import DecoderPool, EncodedSong, Song
from adapter.errors import AdapterError, TooLargeError, UnprocessableError
from adapter.request import SAMPLING_RATE, Clip
from adapter.room import Room
from adapter.song_cache import SongCache

__all__ = [
    "AudioBase64",
    "AudioLimits",
    "AudioUpload",
    "AudioUrl",
    "LoadedSong",
    "Song",
    "Songs",
    "Source",
    "cut",
]


MAX_FETCHES = 8  # of one request at a time

_PIECE_BYTES = 1 << 18  # a thread that decodes or hashes yields to the event loop between pieces
_DATA_PREFIX = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")


@dataclass(frozen=True, slots=True)
class AudioUrl:
    """A song at an http or https URL."""

    url: str
    field = "audio_url"


@dataclass(frozen=True, slots=True, eq=False)  # by identity: the hash of 60 MB takes 40 ms
class AudioBase64:
    """A song as base64, standard or URL-safe, padded or not, with or without a `data:` prefix."""

    text: str
    field = "audio"


@dataclass(frozen=True, slots=True, eq=False)
class AudioUpload:
    """A song in an uploaded file, which stays its owner's to close."""

    file: BinaryIO
    field = "audio"


Source = AudioUrl | AudioBase64 | AudioUpload


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """What the audio door lets in."""

    max_bytes: int
    fetch_timeout_seconds: float = 120.0
    allowed_hosts: Sequence[str] = ()
    allow_private: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LoadedSong:
    """A song, and the seconds its loading took: 0 where another prompt's loading was shared."""

    song: Song
    audio_seconds: float


class Songs:
    """The songs of one request: each is received and decoded once, however many prompts ask.

    Sources are the same where they are the same URL, the same object, or turn out to hold the same
    bytes. A song whose bytes `cache` knows of `owner` is not decoded, unless its loudness is to be
    measured and the cached one has none. Used as an async context manager, whose end stops what is
    still being loaded and gives back what the samples took of `room`: a few MB of silence in FLAC
    hold hours of them, a batch of those many GB.
    """

    def __init__(
        self,
        pool: DecoderPool,
        limits: AudioLimits,
        room: Room,
        turns: Turns,
        *,
        party: Party | None = None,
        cache: SongCache | None = None,
        owner: bytes | None = None,
        measure_loudness: bool = False,
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._room = room
        self._cache = cache
        self._owner = owner
        self._measure_loudness = measure_loudness
        self._loads: dict[Hashable, asyncio.Task[Song]] = {}
        self._turns = turns
        self._party = party or Party()
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._taken_bytes = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._loads.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loads.clear()
        self._room.give_back(self._taken_bytes)
        self._taken_bytes = 0

    async def load(self, source: Source) -> LoadedSong:
        """Receive and decode a source.

        A caller that is cancelled leaves the load running for the others. Raises UnprocessableError
        with the source's field, TooLargeError, NotAudioError, AudioUnavailableError,
        UnavailableError.
        """
        if source in self._loads:
            return LoadedSong(await asyncio.shield(self._loads[source]), 0.0)
        started = time.monotonic()
        try:
            song = await asyncio.shield(self._once(source, self._load(source)))
        except AdapterError as error:
            error.field = error.field or source.field
            raise
        return LoadedSong(song, time.monotonic() - started)

    def _once(self, key: Hashable, load: Coroutine[None, None, Song]) -> asyncio.Task[Song]:
        task = asyncio.create_task(load)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._loads[key] = task
        return task

    async def _load(self, source: Source) -> Song:
        async with self._receive(source) as encoded:
            if encoded.digest not in self._loads:
                self._once(encoded.digest, self._decode(encoded))
            return await asyncio.shield(self._loads[encoded.digest])

    async def _decode(self, encoded: EncodedSong) -> Song:
        key = (self._owner, encoded.digest)
        song = self._cache.get(key) if self._cache else None
        if song is None or (self._measure_loudness and song.loudness_lufs is None):
            async with self._turns.turn(self._party):
                self._room.take(0)  # what follows the one too many is not decoded
                song = await self._pool.decode(
                    encoded.file, measure_loudness=self._measure_loudness
                )
        num_bytes = song.samples.nbytes
        try:
            self._room.take(num_bytes)
        except AdapterError:
            del song  # the error's traceback, which stays as long as the request, would keep it
            raise
        self._taken_bytes += num_bytes
        if self._cache:
            self._cache.put(key, song)
        return song

    @contextlib.asynccontextmanager
    async def _receive(self, source: Source) -> AsyncIterator[EncodedSong]:
        limits = self._limits
        if isinstance(source, AudioUpload):
            yield await asyncio.to_thread(read_upload, source.file, limits.max_bytes)
            return
        if isinstance(source, AudioBase64):
            encoded = await asyncio.to_thread(decode_base64, source.text, limits.max_bytes)
        else:
            from adapter.fetch import fetch  # aiohttp, which `Service.open` has imported

            async with self._fetches:
                encoded = await fetch(
                    source.url,
                    max_bytes=limits.max_bytes,
                    timeout_seconds=limits.fetch_timeout_seconds,
                    allowed_hosts=limits.allowed_hosts,
                    allow_private=limits.allow_private,
                )
        with encoded.file:
            yield encoded


def read_upload(file: BinaryIO, max_bytes: int) -> EncodedSong:
    """Measure and hash an uploaded file, whatever its position; the position stays."""
    file.flush()
    fd = file.fileno()
    num_bytes = os.fstat(fd).st_size
    if num_bytes > max_bytes:
        raise too_large(max_bytes)
    digest = hashlib.sha256()
    for position in range(0, num_bytes, _PIECE_BYTES):
        digest.update(os.pread(fd, _PIECE_BYTES, position))
    return EncodedSong(file, num_bytes, digest.hexdigest())


def decode_base64(text: str, max_bytes: int) -> EncodedSong:
    """Decode base64 into an unnamed temporary file, piece by piece; white space is skipped.

    Raises UnprocessableError for what is no base64, TooLargeError as soon as the limit is passed.
    """
    prefix = _DATA_PREFIX.match(text)
    start = prefix.end() if prefix else 0
    end = max(start, len(text.rstrip("= \t\r\n")))
    with contextlib.ExitStack() as unfinished:
        file = unfinished.enter_context(tempfile.TemporaryFile())
        digest = hashlib.sha256()
        num_bytes = 0
        for piece in base64_pieces(text, start, end):
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise too_large(max_bytes)
            digest.update(piece)
            file.write(piece)
        unfinished.pop_all()
    return EncodedSong(file, num_bytes, digest.hexdigest())


def base64_pieces(text: str, start: int, end: int) -> Iterator[bytes]:
    rest = ""
    for position in range(start, end, _PIECE_BYTES):
        piece = rest + "".join(text[position : min(position + _PIECE_BYTES, end)].split())
        whole = len(piece) // 4 * 4
        rest = piece[whole:]
        yield decode_piece(piece[:whole])
    yield decode_piece(rest + "=" * (-len(rest) % 4))


def decode_piece(piece: str) -> bytes:
    try:
        return binascii.a2b_base64(piece.encode("ascii").translate(_TO_STANDARD), strict_mode=True)
    except ValueError:
        raise UnprocessableError(
            "The audio is no valid base64; send the file's bytes as standard or URL-safe base64.",
            code="invalid_value",
            field="audio",
        ) from None


def too_large(max_bytes: int) -> TooLargeError:
    return TooLargeError(f"The audio file is larger than the {max_bytes} bytes that are allowed.")


def cut(
    song: Song,
    *,
    start_seconds: float | None,
    end_seconds: float | None,
    max_seconds: float,
    audible: Callable[[int], int],
    key: bytes | None = None,
) -> Clip:
    """Cut a moment out of a song, and that to what the checkpoint hears.

    An `end_seconds` past the song's end means its end. What is left is cut to `max_seconds`, and
    then to the first `audible(num_samples)` samples. The clip's uuid names its samples: it is made
    of the song's digest and the clip's place, so that nothing is hashed again, and with a `key` is
    an HMAC, which tells no other key's holder what was sent.

    Raises UnprocessableError (`moment_outside_song`).
    """
    start = start_seconds or 0.0
    check_moment(song.duration_seconds, start, end_seconds)
    num_samples = len(song.samples)
    first = sample_index(start, song)
    last = num_samples if end_seconds is None else max(first, sample_index(end_seconds, song))
    heard = min(last - first, round(max_seconds * SAMPLING_RATE))
    stop = first + audible(heard)
    return Clip(
        samples=song.samples[first:stop],
        uuid=name_samples(song, first, stop, key),
        duration_seconds=song.duration_seconds,
        start_seconds=start,
        truncated=heard < last - first,
    )


def check_moment(duration_seconds: float, start: float, end_seconds: float | None) -> None:
    if start >= duration_seconds:
        reason = f"the song ends at {duration_seconds:g}"
    elif end_seconds is not None and start > end_seconds:
        reason = f"end_seconds is {end_seconds:g}"
    else:
        return
    raise UnprocessableError(
        f"The moment starts at {start:g} seconds, but {reason}; choose an earlier start_seconds.",
        code="moment_outside_song",
        field="start_seconds",
    )


def sample_index(seconds: float, song: Song) -> int:
    """The nearest sample; the song's end for whatever lies beyond it."""
    inside = min(seconds, song.duration_seconds)
    return min(round(inside * SAMPLING_RATE), len(song.samples))


def name_samples(song: Song, first: int, stop: int, key: bytes | None) -> str:
    whole = first == 0 and stop == len(song.samples)
    name = song.digest if whole else f"{song.digest}-{first}-{stop}"
    return name if key is None else hmac.digest(key, name.encode(), "sha256").hex()
