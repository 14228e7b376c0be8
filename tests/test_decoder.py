"""The decoder pool: every format to the same samples, and a bad file hurts nobody else."""

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import librosa
import numpy as np
import pytest
import pytest_asyncio
from av.audio.layout import AudioLayout

from adapter.decoder import DecoderPool, Song
from adapter.decoder_worker import MAX_CHANNELS, is_custom
from adapter.errors import AdapterError, NotAudioError, UnavailableError, UnprocessableError
from tests.songs import (
    FORMATS,
    Samples,
    encode,
    id3_tag,
    melody,
    real_song,
    wav_header,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOSSLESS = [name for name, form in FORMATS.items() if form.lossless]
LOSSY = [name for name, form in FORMATS.items() if not form.lossless]
POOR_ENCODERS = {"ogg-vorbis": 0.85}  # FFmpeg's own Vorbis encoder is an experiment


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecoderPool]:
    async with running(DecoderPool(1, max_audio_seconds=600)) as pool:
        yield pool


@contextlib.asynccontextmanager
async def running(pool: DecoderPool) -> AsyncIterator[DecoderPool]:
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def hostile(num_workers: int = 1, timeout_seconds: float = 30) -> DecoderPool:
    return DecoderPool(
        num_workers,
        max_audio_seconds=600,
        timeout_seconds=timeout_seconds,
        worker_module="tests.hostile_worker",
    )


async def decode(pool: DecoderPool, data: bytes) -> Song:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        return await pool.decode(file)


def reference(samples: Samples, rate: int) -> Samples:
    """What the Hugging Face processor's own loader makes of the samples."""
    mono = samples.mean(axis=0).astype(np.float32)
    return librosa.resample(mono, orig_sr=rate, target_sr=16_000, res_type="soxr_hq")


def aligned_correlation(one: Samples, other: Samples) -> float:
    """The correlation at the best shift, since codecs delay."""
    size = 2 * max(len(one), len(other))
    spectrum = np.fft.rfft(one, size) * np.fft.rfft(other, size).conj()
    shift = int(np.argmax(np.fft.irfft(spectrum)))
    shift = shift - size if shift > size // 2 else shift
    one, other = one[max(0, shift) :], other[max(0, -shift) :]
    length = min(len(one), len(other))
    return float(np.corrcoef(one[:length], other[:length])[0, 1])


# What comes out


@pytest.mark.parametrize("name", LOSSLESS)
async def test_a_lossless_file_gives_the_samples_of_librosa(pool: DecoderPool, name: str) -> None:
    samples = melody(2.72, FORMATS[name].rate)  # whole blocks of eight bytes, to which w64 pads
    song = await decode(pool, encode(samples, name))
    expected = reference(samples, FORMATS[name].rate)
    assert song.samples.shape == expected.shape
    np.testing.assert_allclose(song.samples, expected, atol=2e-5)  # 16 bits round by 1.5e-5
    assert song.duration_seconds == pytest.approx(2.72, abs=1e-4)


@pytest.mark.parametrize("name", LOSSY)
async def test_a_lossy_file_gives_the_song_within_50_ms(pool: DecoderPool, name: str) -> None:
    samples = melody(4.2, FORMATS[name].rate)
    song = await decode(pool, encode(samples, name))
    expected = reference(samples, FORMATS[name].rate)
    assert aligned_correlation(song.samples, expected) > POOR_ENCODERS.get(name, 0.98)
    assert abs(len(song.samples) - len(expected)) <= 0.05 * 16_000


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 32_000, 44_100, 48_000, 88_200, 192_000])
@pytest.mark.parametrize("num_samples", [4_411, 100_003])
async def test_any_rate_is_resampled_as_librosa_does(
    pool: DecoderPool, rate: int, num_samples: int
) -> None:
    samples = np.random.default_rng(rate).uniform(-1, 1, (1, num_samples)).astype(np.float32)
    song = await decode(pool, encode(samples, "wav-float", rate=rate))
    expected = reference(samples, rate)
    assert song.samples.shape == expected.shape
    np.testing.assert_allclose(song.samples, expected, atol=1e-5)


async def test_16_khz_passes_untouched(pool: DecoderPool) -> None:
    samples = melody(1.0, 16_000, num_channels=1).astype(np.float32)
    song = await decode(pool, encode(samples, "wav-float", rate=16_000))
    assert np.array_equal(song.samples, samples[0])


@pytest.mark.parametrize("num_channels", range(1, 9))
@pytest.mark.parametrize("name", ["wav-24", "flac", "wavpack"])
async def test_mono_is_the_plain_mean_of_all_channels(
    pool: DecoderPool, name: str, num_channels: int
) -> None:
    samples = melody(0.7, num_channels=num_channels)
    song = await decode(pool, encode(samples, name))
    np.testing.assert_allclose(song.samples, reference(samples, 44_100), atol=2e-5)


@pytest.mark.parametrize("name", ["m4a", "opus"])
async def test_eight_channels_on_planes_of_their_own_are_all_heard(
    pool: DecoderPool, name: str
) -> None:
    samples = melody(2, FORMATS[name].rate, num_channels=8)
    samples[3] = 0  # the channel of low frequencies, of which codecs keep no more than those
    song = await decode(pool, encode(samples, name))
    expected = reference(samples, FORMATS[name].rate)
    assert aligned_correlation(song.samples, expected) > 0.98
    assert song.samples.std() == pytest.approx(expected.std(), rel=0.05)


@pytest.mark.parametrize(
    ("layout", "custom"),
    [
        ("stereo", False),
        ("8 channels", False),
        ("3 channels (FL+FC+LFE)", False),
        ("FR+FL", True),
        ("FL+FR+FC+LFE+SL+SR+BL+BR", True),
    ],
)
async def test_a_layout_that_is_a_list_of_its_own_is_known(layout: str, custom: bool) -> None:
    assert is_custom(AudioLayout(layout)) is custom


async def test_an_aiff_whose_eight_channels_have_an_unusual_order_is_decoded(
    pool: DecoderPool,
) -> None:
    samples = melody(1, num_channels=8)
    data = encode(samples, "aiff")
    chan = (
        b"CHAN" + (12).to_bytes(4, "big") + b"\0\x80\0\x08" + bytes(8)
    )  # FL FR FC LFE SL SR BL BR
    at = data.index(b"SSND")
    song = await decode(pool, data[:at] + chan + data[at:])
    np.testing.assert_allclose(song.samples, reference(samples, 44_100), atol=2e-5)


async def test_what_is_no_number_is_silence_and_what_is_huge_stays_finite(
    pool: DecoderPool,
) -> None:
    samples = np.zeros((1, 16_000), dtype=np.float64)
    samples[0, 100:105] = np.nan, np.inf, -np.inf, 1e300, 0.5
    samples[0, 200] = 1e30
    song = await decode(pool, encode(samples, "wav-double", rate=16_000))
    assert list(song.samples[99:106]) == [0, 0, 0, 0, 0, 0.5, 0]
    assert song.samples[200] == 2.0**31
    resampled = await decode(pool, encode(samples, "wav-double", rate=44_100))
    assert np.isfinite(resampled.samples).all()


async def test_silence_is_a_song(pool: DecoderPool) -> None:
    song = await decode(pool, encode(np.zeros((2, 44_100)), "wav-16"))
    assert len(song.samples) == 16_000
    assert not song.samples.any()


async def test_equal_samples_have_equal_digests_in_any_container(pool: DecoderPool) -> None:
    samples = melody(1.0)
    digests = {
        (await decode(pool, encode(samples, name))).digest for name in ("wav-16", "flac", "alac")
    }
    assert len(digests) == 1
    other = await decode(pool, encode(melody(1.0, seed=1), "wav-16"))
    assert other.digest not in digests


async def test_the_samples_cannot_be_written_to(pool: DecoderPool) -> None:
    song = await decode(pool, encode(melody(1.0), "wav-16"))
    assert not song.samples.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        song.samples[0] = 1


async def test_a_real_song_of_five_minutes_is_decoded_whole(pool: DecoderPool) -> None:
    with real_song().open("rb") as file:
        song = await pool.decode(file)
    assert song.duration_seconds == pytest.approx(321.75, abs=0.01)
    assert len(song.samples) == math.ceil(song.duration_seconds * 16_000)
    assert 0.1 < np.abs(song.samples).max() < 2


async def test_the_loudness_is_measured_where_it_is_asked_for(pool: DecoderPool) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(encode(melody(2), "wav-16"))
        silent, measured = [
            await pool.decode(file, measure_loudness=measure) for measure in (False, True)
        ]
    assert silent.loudness_lufs is None
    assert measured.loudness_lufs is not None and -40 < measured.loudness_lufs < 0
    assert silent.digest == measured.digest


# What people send


def id3_with_cover() -> bytes:
    return id3_tag(300_000) + encode(melody(5), "mp3")


def mp3_without_its_last_bytes() -> bytes:
    return encode(melody(5), "mp3")[:-100]


def mp3_with_a_broken_header() -> bytes:
    return np.random.default_rng(0).bytes(700) + encode(melody(5, 48_000), "mp3-320k")[2_000:]


def wav_that_claims_four_gigabytes() -> bytes:
    return wav_header(0xFFFFFFFF) + encode(melody(5), "wav-16")[44:]


def wav_that_claims_nothing() -> bytes:
    return wav_header(0) + encode(melody(5), "wav-16")[44:]


def two_oggs_in_a_row() -> bytes:
    return encode(melody(2.5, 48_000), "opus") * 2


def mp3_that_changes_its_rate_and_channels() -> bytes:
    return encode(melody(2.5), "mp3") + encode(melody(2.5, 48_000, 1), "mp3-320k")


@pytest.mark.parametrize(
    "make",
    [
        id3_with_cover,
        mp3_without_its_last_bytes,
        mp3_with_a_broken_header,
        wav_that_claims_four_gigabytes,
        wav_that_claims_nothing,
        two_oggs_in_a_row,
        mp3_that_changes_its_rate_and_channels,
    ],
)
async def test_a_damaged_or_odd_file_gives_its_true_duration(
    pool: DecoderPool, make: Callable[[], bytes]
) -> None:
    song = await decode(pool, make())
    assert song.duration_seconds == pytest.approx(5, abs=0.1)
    assert len(song.samples) == pytest.approx(5 * 16_000, abs=1_600)
    assert np.isfinite(song.samples).all()


@pytest.mark.parametrize("name", ["mp3", "flac", "ogg-vorbis", "opus", "wma", "wav-16"])
async def test_what_stands_before_a_broken_end_is_kept(pool: DecoderPool, name: str) -> None:
    data = encode(melody(6, FORMATS[name].rate), name)
    song = await decode(pool, data[: len(data) // 2])
    assert 1.9 < song.duration_seconds < 4


NO_AUDIO = {
    "empty": b"",
    "text": b"This is a text file, and no song at all.\n" * 500,
    "html": b"<!DOCTYPE html><html><body>404</body></html>",
    "png": b"\x89PNG\r\n\x1a\n" + bytes(2_000),
    "jpeg": b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + bytes(2_000),
    "zip": b"PK\x03\x04" + bytes(2_000),
    "elf": Path(sys.executable).read_bytes()[:100_000],
    "noise": np.random.default_rng(0).bytes(500_000),
    "zeros": bytes(500_000),
    "wav header alone": wav_header(44_100),
    "wav of no channels": wav_header(4_000, num_channels=0) + bytes(4_000),
    "id3 tag alone": id3_tag(2_000),
    "half an m4a": encode(melody(5), "m4a")[:20_000],
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 9 RTP/AVP 0\n",
    "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n%s\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile '%s'\n",
}


@pytest.mark.parametrize("name", NO_AUDIO)
async def test_what_is_no_audio_is_refused_and_opens_no_other_file(
    pool: DecoderPool, name: str, tmp_path: Path
) -> None:
    song = tmp_path / "song.wav"
    song.write_bytes(encode(melody(1), "wav-16"))
    data = NO_AUDIO[name].replace(b"%s", str(song).encode())
    with pytest.raises(NotAudioError) as caught:
        await decode(pool, data)
    assert caught.value.code == "not_audio"


# Limits


async def test_a_song_that_unpacks_past_the_limit_is_stopped_there() -> None:
    hours = encode(np.zeros((1, 2 * 3600 * 8_000)), "flac", rate=8_000)
    assert len(hours) < 1_500_000
    async with running(DecoderPool(1, max_audio_seconds=100)) as pool:
        started = time.monotonic()
        with pytest.raises(UnprocessableError, match="longer than the 100 seconds") as caught:
            await decode(pool, hours)
        assert caught.value.code == "audio_too_long"
        assert time.monotonic() - started < 10
        assert (await decode(pool, encode(melody(99.9, 8_000), "wav-16", rate=8_000))).samples.any()


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (wav_header(8_000, rate=1), "audio_rate_out_of_range"),
        (wav_header(8_000, rate=999), "audio_rate_out_of_range"),
        (wav_header(8_000, rate=800_000), "audio_rate_out_of_range"),
        (wav_header(8_000, num_channels=MAX_CHANNELS + 1), "audio_too_many_channels"),
    ],
)
async def test_a_shape_out_of_range_is_refused(pool: DecoderPool, header: bytes, code: str) -> None:
    with pytest.raises(UnprocessableError) as caught:
        await decode(pool, header + bytes(8_000))
    assert caught.value.code == code


async def test_a_tag_of_50_mb_does_not_pass_the_memory_limit(pool: DecoderPool) -> None:
    song = await decode(pool, id3_tag(50 << 20) + encode(melody(2), "mp3"))
    assert song.duration_seconds == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize(
    ("order", "error", "code"),
    [
        (b"CRASH   ", NotAudioError, "not_audio"),
        (b"HANG    ", UnprocessableError, "audio_too_complex"),
        (b"SPIN    ", UnprocessableError, "audio_too_complex"),
        (b"SWALLOW ", UnprocessableError, "audio_too_complex"),
        (b"OPEN    ", NotAudioError, "not_audio"),
        (b"LIE     ", NotAudioError, "not_audio"),
    ],
)
async def test_a_file_that_breaks_its_decoder_fails_alone(
    order: bytes, error: type[AdapterError], code: str
) -> None:
    song = encode(melody(1), "wav-16")
    async with running(hostile(num_workers=2, timeout_seconds=1.5)) as pool:
        for _ in range(2):
            broken, good = await asyncio.gather(
                decode(pool, order), decode(pool, song), return_exceptions=True
            )
            assert isinstance(broken, error)
            assert broken.code == code
            assert isinstance(good, Song)


# Processes


def worker_pids(pool: DecoderPool) -> set[int]:
    return {worker.process.pid for worker in pool._workers}


def lives(pid: int) -> bool:
    """Whether a process is there, a zombie included."""
    return Path(f"/proc/{pid}").exists()


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the kernel's processes raise no event
            await asyncio.sleep(0.02)


async def test_a_client_that_leaves_ends_its_worker_and_another_takes_the_seat() -> None:
    async with running(hostile()) as pool:
        (pid,) = worker_pids(pool)
        task = asyncio.create_task(decode(pool, b"HANG    "))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await decode(pool, encode(melody(1), "flac"))).duration_seconds == 1
        await wait_until(lambda: not lives(pid))


async def test_a_worker_that_died_at_rest_costs_no_song() -> None:
    async with running(hostile()) as pool:
        (pid,) = worker_pids(pool)
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: not lives(pid))
        assert (await decode(pool, encode(melody(1), "flac"))).duration_seconds == 1


async def test_many_songs_wait_for_few_workers() -> None:
    song = encode(melody(1), "flac")
    async with running(hostile(num_workers=2)) as pool:
        before = worker_pids(pool)
        songs = await asyncio.gather(*(decode(pool, song) for _ in range(20)))
        assert len({song.digest for song in songs}) == 1
        assert worker_pids(pool) == before


async def test_closing_ends_workers_and_fails_the_songs_at_work_and_in_the_queue() -> None:
    pool = hostile()
    await pool.start()
    pids = worker_pids(pool)
    tasks = [asyncio.create_task(decode(pool, b"HANG    ")) for _ in range(3)]
    await asyncio.sleep(0.2)
    await pool.close()
    async with asyncio.timeout(5):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, UnavailableError) for result in results)
    await pool.close()
    assert not any(lives(pid) for pid in pids)
    with pytest.raises(UnavailableError):
        await decode(pool, b"")


async def test_workers_outlive_a_ctrl_c_and_a_sigterm_for_the_group(pool: DecoderPool) -> None:
    before = worker_pids(pool)
    for pid in before:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    await decode(pool, encode(melody(1), "flac"))
    assert worker_pids(pool) == before


@pytest.mark.parametrize("order", [b"", b"HANG    ", b"SPIN    "])
async def test_workers_end_with_a_server_that_is_killed(order: bytes) -> None:
    program = f"""
import asyncio, tempfile
from tests.test_decoder import decode, hostile, worker_pids
async def main():
    pool = hostile()
    await pool.start()
    print(*worker_pids(pool), flush=True)
    if {order!r}:
        await decode(pool, {order!r})
    await asyncio.sleep(100)
asyncio.run(main())
"""
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as server:
        assert server.stdout
        pid = int(await asyncio.to_thread(server.stdout.readline))
        await asyncio.sleep(0.3)
        assert lives(pid)
        server.kill()
    # An orphan is reaped by whatever runs as process 1, so a zombie counts as ended here.
    await wait_until(
        lambda: not lives(pid) or "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    )


async def test_workers_know_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    async with running(DecoderPool(1, max_audio_seconds=1)) as pool:
        (pid,) = worker_pids(pool)
        assert b"hf_secret" not in environment_of(pid)


async def test_a_song_of_twenty_minutes_holds_the_loop_for_no_moment_and_leaves_nothing() -> None:
    data = encode(np.tile(melody(10, 16_000, 1), 120), "wav-16", rate=16_000)
    files_before = num_open_files()
    gaps = [0.0]

    async def watch() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - started)

    async with running(DecoderPool(1, max_audio_seconds=1200)) as pool:
        with tempfile.TemporaryFile() as file:
            file.write(data)
            watcher = asyncio.create_task(watch())
            song = await pool.decode(file)
            watcher.cancel()
    assert song.duration_seconds == 1200
    assert max(gaps) < 0.1
    del song  # the thread that hashed it may hold it for a moment yet
    await wait_until(lambda: num_open_files() == files_before)
