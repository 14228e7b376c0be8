"""The audio door: each song of a request loaded once, and moments cut out of it."""

import asyncio
import base64
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from adapter.admission import Turns
from adapter.audio import (
    AudioBase64,
    AudioLimits,
    AudioUpload,
    AudioUrl,
    Song,
    Songs,
    Source,
    cut,
    decode_base64,
)
from adapter.decoder import DecoderPool
from adapter.errors import (
    AdapterError,
    AudioUnavailableError,
    NotAudioError,
    TooLargeError,
    UnavailableError,
    UnprocessableError,
)
from adapter.request import Clip
from adapter.room import Room
from adapter.song_cache import SongCache
from tests.songs import encode, melody, real_song
from tests.test_fetch import serving

LIMITS = AudioLimits(max_bytes=4_000_000, fetch_timeout_seconds=10, allow_private=True)


class CountingPool(DecoderPool):
    """A decoder pool that counts the songs it was given."""

    num_songs = 0

    async def decode(self, file: BinaryIO, *, measure_loudness: bool = False) -> Song:
        self.num_songs += 1
        return await super().decode(file, measure_loudness=measure_loudness)


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[CountingPool]:
    pool = CountingPool(1, max_audio_seconds=600)
    await pool.start()
    yield pool
    await pool.close()


def upload(data: bytes) -> AudioUpload:
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(data)
    return AudioUpload(file)


def as_base64(data: bytes) -> AudioBase64:
    return AudioBase64(base64.b64encode(data).decode())


# Loading


async def test_url_base64_and_upload_of_a_file_give_the_same_song(pool: CountingPool) -> None:
    data = encode(melody(1), "mp3")

    async def serve(request: web.Request) -> web.Response:
        del request
        return web.Response(body=data, content_type="text/plain")

    digests = set()
    async with serving(serve) as base:
        for source in (AudioUrl(f"{base}/picture.png"), as_base64(data), upload(data)):
            async with Songs(pool, LIMITS, new_room(), Turns(2)) as songs:
                digests.add((await songs.load(source)).song.digest)
    assert len(digests) == 1
    assert pool.num_songs == 3


async def test_sixty_four_prompts_load_a_song_once_and_one_is_told_the_time(
    pool: CountingPool,
) -> None:
    requests = 0

    async def serve(request: web.Request) -> web.FileResponse:
        nonlocal requests
        del request
        requests += 1
        return web.FileResponse(real_song())

    async with serving(serve) as base, Songs(pool, LIMITS, new_room(), Turns(2)) as songs:
        loaded = await asyncio.gather(*(songs.load(AudioUrl(base)) for _ in range(64)))
        later = await songs.load(AudioUrl(base))
    assert requests == pool.num_songs == 1
    assert len({id(one.song) for one in [*loaded, later]}) == 1
    seconds = [one.audio_seconds for one in [*loaded, later]]
    assert seconds[0] > 0
    assert seconds[1:] == [0.0] * 64
    assert seconds[0] >= loaded[0].song.decode_seconds > 0


async def test_the_same_bytes_from_many_sources_are_decoded_once(pool: CountingPool) -> None:
    data = encode(melody(1), "flac")
    async with Songs(pool, LIMITS, new_room(), Turns(2)) as songs:
        sources: list[Source] = [as_base64(data) for _ in range(5)] + [upload(data)]
        loaded = await asyncio.gather(*map(songs.load, sources))
    assert pool.num_songs == 1
    assert len({id(one.song) for one in loaded}) == 1


async def test_the_next_request_about_the_same_bytes_decodes_nothing_unless_it_is_anothers(
    pool: CountingPool,
) -> None:
    data = encode(melody(1), "flac")
    cache = SongCache(2**20)
    for owner in (b"ann", b"ann", b"bob", b"ann"):
        async with Songs(pool, LIMITS, new_room(), Turns(2), cache=cache, owner=owner) as songs:
            loaded = await songs.load(as_base64(data))
            assert len(loaded.song.samples) == 16_000
    assert pool.num_songs == 2


async def test_a_cached_song_without_the_loudness_that_is_asked_for_is_decoded_once_more(
    pool: CountingPool,
) -> None:
    data = encode(melody(1), "flac")
    cache = SongCache(2**20)

    async def load(measure_loudness: bool) -> Song:
        async with Songs(
            *(pool, LIMITS, new_room(), Turns(2)), cache=cache, measure_loudness=measure_loudness
        ) as songs:
            return (await songs.load(as_base64(data))).song

    assert (await load(False)).loudness_lufs is None
    measured = await load(True)
    assert measured.loudness_lufs is not None
    assert pool.num_songs == 2
    assert await load(True) is measured
    assert await load(False) is measured
    assert pool.num_songs == 2


async def test_different_songs_are_loaded_side_by_side(pool: CountingPool) -> None:
    async with Songs(pool, LIMITS, new_room(), Turns(2)) as songs:
        sources = [as_base64(encode(melody(1, seed=seed), "flac")) for seed in range(3)]
        loaded = await asyncio.gather(*map(songs.load, sources))
    assert len({one.song.digest for one in loaded}) == pool.num_songs == 3


async def test_a_prompt_that_leaves_does_not_stop_the_others(pool: CountingPool) -> None:
    source = as_base64(encode(melody(60), "flac"))
    async with Songs(pool, LIMITS, new_room(), Turns(2)) as songs:
        leaving = asyncio.create_task(songs.load(source))
        await asyncio.sleep(0)
        staying = asyncio.create_task(songs.load(source))
        await asyncio.sleep(0.01)
        leaving.cancel()
        assert (await staying).song.duration_seconds == 60
    assert leaving.cancelled()


async def test_the_end_of_a_request_stops_its_loading_and_closes_its_files(
    pool: CountingPool,
) -> None:
    left = asyncio.Event()
    files_before = temporary_files()

    async def serve(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(bytes(1_000))
                await asyncio.sleep(0.01)
        except (ConnectionError, asyncio.CancelledError):
            left.set()
            raise

    async with serving(serve) as base:
        async with Songs(pool, LIMITS, new_room(), Turns(2)) as songs:
            task = asyncio.create_task(songs.load(AudioUrl(base)))
            await asyncio.sleep(0.2)
        async with asyncio.timeout(2):
            await left.wait()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert temporary_files() == files_before


def new_room() -> Room:
    return Room("the songs", 2**30)


def temporary_files() -> set[str]:
    """The temporary files that are open, named or not."""
    links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    names = {str(link.readlink()) for link in links}
    return {name for name in names if name.startswith(tempfile.gettempdir())}


async def test_the_samples_of_all_requests_together_have_a_limit(pool: CountingPool) -> None:
    room, turns = Room("the songs", max_bytes=3 * 9 * 64_000), Turns(2)
    sources = [as_base64(encode(melody(9, seed=seed), "flac")) for seed in range(6)]
    async with Songs(pool, LIMITS, room, turns) as some, Songs(pool, LIMITS, room, turns) as others:
        loads = [*map(some.load, sources[:3]), *map(others.load, sources[3:])]
        results = await asyncio.gather(*loads, return_exceptions=True)
        refused = [result for result in results if isinstance(result, UnavailableError)]
        assert [error.code for error in refused] == ["queue_full"] * 3
        num_decoded = pool.num_songs
        with pytest.raises(UnavailableError):
            await some.load(as_base64(encode(melody(1), "flac")))
        assert pool.num_songs == num_decoded  # refused before it is decoded
    assert room.held_bytes == 0


@pytest.mark.parametrize(
    ("source", "error", "field"),
    [
        (AudioBase64("no base64 at all!"), UnprocessableError, "audio"),
        (AudioBase64(""), NotAudioError, "audio"),
        (as_base64(b"a text file " * 100), NotAudioError, "audio"),
        (as_base64(bytes(4_000_001)), TooLargeError, "audio"),
        (AudioUrl("http://169.254.169.254/"), UnprocessableError, "audio_url"),
        (AudioUrl("http://127.0.0.1:1/"), AudioUnavailableError, "audio_url"),
    ],
)
async def test_an_error_names_the_field_and_is_everybody_s(
    pool: CountingPool, source: Source, error: type[AdapterError], field: str
) -> None:
    async with Songs(pool, LIMITS, new_room(), Turns(2)) as songs:
        for _ in range(2):
            with pytest.raises(error) as caught:
                await songs.load(source)
            assert caught.value.field == field


async def test_an_upload_past_the_limit_is_refused(pool: CountingPool) -> None:
    async with Songs(pool, LIMITS, new_room(), Turns(2)) as songs:
        with pytest.raises(TooLargeError):
            await songs.load(upload(bytes(4_000_001)))


async def test_an_upload_is_read_from_its_start_and_stays_open(pool: CountingPool) -> None:
    source = upload(encode(melody(1), "flac"))  # its position is the end
    async with Songs(pool, LIMITS, new_room(), Turns(2)) as songs:
        assert (await songs.load(source)).song.duration_seconds == 1
    assert not source.file.closed


# Base64


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 3, 4, 299, 262_144, 600_001])
@pytest.mark.parametrize(
    "write",
    [
        lambda data: base64.b64encode(data).decode(),
        lambda data: base64.urlsafe_b64encode(data).decode(),
        lambda data: base64.b64encode(data).decode().rstrip("="),
        lambda data: "data:audio/mpeg;base64," + base64.b64encode(data).decode(),
        lambda data: "DATA:audio/ogg;codecs=opus;base64," + base64.urlsafe_b64encode(data).decode(),
        lambda data: "data:;base64," + base64.b64encode(data).decode(),
        lambda data: "\n".join(textwrap.wrap(base64.b64encode(data).decode(), 76)) + "\r\n",
    ],
)
def test_base64_is_read_in_every_spelling(write, num_bytes: int) -> None:  # type: ignore[no-untyped-def]
    data = np.random.default_rng(num_bytes).bytes(num_bytes)
    encoded = decode_base64(write(data), max_bytes=num_bytes)
    encoded.file.seek(0)
    assert encoded.file.read() == data
    assert encoded.num_bytes == num_bytes


@pytest.mark.parametrize(
    "text", ["A", "AAAAA", "AA=A", "AAAA=AAA", "AA*A", "AAé=", "data:audio/wav,AAAA", "\x00AAA"]
)
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(UnprocessableError, match="base64") as caught:
        decode_base64(text, max_bytes=1_000)
    assert caught.value.field == "audio"


def test_base64_past_the_limit_is_refused() -> None:
    decode_base64("AAAA" * 10, max_bytes=30)
    with pytest.raises(TooLargeError):
        decode_base64("AAAA" * 10 + "AA", max_bytes=30)


# Moments


def song_of(num_samples: int, duration_seconds: float | None = None) -> Song:
    samples = np.arange(num_samples, dtype=np.float32)
    samples.flags.writeable = False
    seconds = num_samples / 16_000 if duration_seconds is None else duration_seconds
    return Song(samples, seconds, digest="d1", decode_seconds=0.0)


def moment(
    song: Song,
    start_seconds: float | None = None,
    end_seconds: float | None = None,
    *,
    max_seconds: float = 1200,
    key: bytes | None = None,
) -> Clip:
    return cut(
        song,
        start_seconds=start_seconds,
        end_seconds=end_seconds,
        max_seconds=max_seconds,
        audible=lambda num_samples: num_samples,
        key=key,
    )


def test_no_moment_is_the_whole_song() -> None:
    song = song_of(160_000)
    clip = moment(song)
    assert clip.samples.base is not None  # a view: nothing is copied
    assert len(clip.samples) == 160_000
    assert (clip.duration_seconds, clip.start_seconds, clip.heard_seconds) == (10, 0, 10)
    assert not clip.truncated


@pytest.mark.parametrize(
    ("start", "end", "first", "last"),
    [
        (1.0, 2.0, 16_000, 32_000),
        (None, 2.0, 0, 32_000),
        (2.5, None, 40_000, 160_000),
        (0.1, 0.2, 1_600, 3_200),
        (1 / 3, 2 / 3, 5_333, 10_667),
        (0, 10, 0, 160_000),
        (9, 1e308, 144_000, 160_000),
        (9.99997, None, 160_000, 160_000),
        (3, 3, 48_000, 48_000),
    ],
)
def test_a_moment_is_cut_to_the_nearest_sample_and_a_late_end_is_clamped(
    start: float | None, end: float | None, first: int, last: int
) -> None:
    clip = moment(song_of(160_000), start, end)
    assert np.array_equal(clip.samples, np.arange(first, last))
    assert clip.start_seconds == (start or 0)
    assert not clip.truncated


@pytest.mark.parametrize(
    ("start", "end"), [(10.0, None), (10.1, 20.0), (1e308, None), (5.0, 4.999), (1.0, 0.0)]
)
def test_a_moment_outside_the_song_is_refused(start: float, end: float | None) -> None:
    with pytest.raises(UnprocessableError, match="choose an earlier start_seconds") as caught:
        moment(song_of(160_000), start, end)
    assert caught.value.code == "moment_outside_song"
    assert caught.value.field == "start_seconds"


def test_the_true_end_counts_where_resampling_rounded_it_up() -> None:
    song = song_of(16_001, duration_seconds=1.00002)
    assert len(moment(song, 0.5).samples) == 8_001
    assert len(moment(song, 1.00001).samples) == 1
    with pytest.raises(UnprocessableError):
        moment(song, 1.00002)


def test_what_is_left_is_cut_to_what_is_heard_and_said_to_be() -> None:
    clip = moment(song_of(160_000), 1, 9, max_seconds=5)
    assert np.array_equal(clip.samples, np.arange(16_000, 96_000))
    assert clip.truncated
    assert clip.duration_seconds == 10
    assert not moment(song_of(160_000), 1, 6, max_seconds=5).truncated


def test_a_tail_without_embeddings_is_dropped_and_is_no_truncation() -> None:
    clip = cut(
        song_of(480_100),
        start_seconds=None,
        end_seconds=None,
        max_seconds=1200,
        audible=lambda num_samples: num_samples // 480_000 * 480_000,
    )
    assert len(clip.samples) == 480_000
    assert not clip.truncated


def test_a_clip_s_uuid_is_the_same_for_the_same_samples_alone() -> None:
    song = song_of(160_000)
    assert moment(song).uuid == moment(song, 0, 10).uuid == moment(song, None, 99).uuid == "d1"
    assert moment(song, 1, 2).uuid == moment(song, 1.0, 2.0, max_seconds=1).uuid
    names = [moment(song, *times).uuid for times in [(0, 9), (1, 10), (1, 9), (0, 10)]]
    assert len(set(names)) == 4
    other = Song(song.samples, song.duration_seconds, digest="d2", decode_seconds=0.0)
    assert moment(other, 1, 9).uuid not in names


def test_a_key_makes_uuids_that_no_other_key_has() -> None:
    song = song_of(160_000)
    names = {moment(song, key=key).uuid for key in (None, b"one", b"two")}
    assert len(names) == 3
    assert moment(song, key=b"one").uuid in names


def test_megabytes_of_blanks_behind_base64_cost_no_time() -> None:
    started = time.monotonic()
    with pytest.raises(UnprocessableError):
        decode_base64("AA" + " " * 30_000_000 + "!", 10)
    decode_base64("AAAA" + " " * 30_000_000, 10).file.close()
    assert time.monotonic() - started < 2
