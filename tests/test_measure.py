"""What is measured of a song: tempo and key of made music, in a process that fails alone, and which
sections disagree with them."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest

from adapter.decoder import Song
from adapter.errors import NotMeasuredError
from adapter.measure import MIN_KEY_STRENGTH, Measured, Measurer, disputable, disputes
from adapter.measure_worker import KEYS, estimate_key, estimate_tempo, measure
from adapter.request import SAMPLING_RATE
from tests.hostile_measurer import CRASH, EXHAUST, HANG, LOOK, LOOKING_SECONDS, SPIN, SWALLOW

Samples = np.ndarray[Any, np.dtype[np.float32]]

CADENCES = {  # I IV V I: only one key has all these notes and rests on the first
    "major": ((0, 4, 7), (5, 9, 12), (7, 11, 14), (0, 4, 7)),
    "minor": ((0, 3, 7), (5, 8, 12), (7, 11, 14), (0, 3, 7)),
}
NOTHING = {"tempo_bpm": None, "key": None, "mode": None, "key_strength": None}


def seconds_of(num_samples: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.arange(num_samples) / SAMPLING_RATE


def noise(seconds: float, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.1, round(seconds * SAMPLING_RATE)).astype(np.float32)


def tone(frequency: float, seconds: float) -> Samples:
    time = seconds_of(round(seconds * SAMPLING_RATE))
    return (0.3 * np.sin(2 * np.pi * frequency * time)).astype(np.float32)


def drums(bpm: float, seconds: float) -> Samples:
    """A click of 50 ms on each beat over faint noise, the first of four louder."""
    song = 0.03 * noise(seconds)
    click = noise(0.05, seed=1) * np.exp(-np.arange(800) / 150)
    for beat in range(int(seconds * bpm / 60)):
        start = round(beat * 60 / bpm * SAMPLING_RATE)
        room = song[start : start + len(click)]
        room += click[: len(room)] * (3 if beat % 4 == 0 else 2)
    return song


def chords(home: int, mode: str, bpm: float = 100, seconds: float = 16) -> Samples:
    """A cadence of two beats a chord, of tones with overtones and a bass; `home` is above C."""
    song = np.zeros(round(seconds * SAMPLING_RATE), np.float32)
    length = round(120 / bpm * SAMPLING_RATE)
    for index, start in enumerate(range(0, len(song), length)):
        room = song[start : start + length]
        notes = CADENCES[mode][index % 4]
        time = seconds_of(len(room))
        for note in (*notes, notes[0] - 12):
            for overtone in (1, 2, 3):
                frequency = 130.81 * 2 ** ((home + note) / 12) * overtone
                room += np.sin(2 * np.pi * frequency * time) * np.exp(-2 * time) / overtone / 10
    return song


def song_of(samples: Samples, loudness_lufs: float | None = None) -> Song:
    return Song(samples, len(samples) / SAMPLING_RATE, "digest", 0.0, loudness_lufs)


# Tempo


@pytest.mark.parametrize("bpm", [60, 83.3, 97.5, 128, 142.7, 180])
@pytest.mark.parametrize("seconds", [10, 70])
def test_a_clear_beat_is_found_within_a_percent_but_for_octaves(bpm: float, seconds: int) -> None:
    tempo = estimate_tempo(drums(bpm, seconds))
    assert tempo is not None
    assert min(abs(tempo * octave / bpm - 1) for octave in (0.5, 1, 2)) < 0.01


def test_a_beat_below_chords_is_found_and_so_is_their_key() -> None:
    measured = measure(drums(112, 40) + chords(9, "minor", 112, 40))
    assert measured["tempo_bpm"] in (pytest.approx(112, rel=0.01), pytest.approx(56, rel=0.01))
    assert (measured["key"], measured["mode"]) == ("A", "minor")


# Key


@pytest.mark.parametrize("mode", ["major", "minor"])
@pytest.mark.parametrize("home", range(12))
def test_the_key_of_a_cadence_is_found_in_all_keys_with_strength(home: int, mode: str) -> None:
    estimate = estimate_key(chords(home, mode))
    assert estimate is not None
    assert estimate[:2] == (KEYS[home], mode)
    assert MIN_KEY_STRENGTH < estimate[2] <= 1


def test_a_song_that_is_tuned_a_third_of_a_semitone_off_has_its_key() -> None:
    samples = chords(3, "major", seconds=20)
    squeezed = np.interp(np.arange(0, len(samples), 2 ** (0.33 / 12)), range(len(samples)), samples)
    estimate = estimate_key(squeezed.astype(np.float32))
    assert estimate is not None
    assert estimate[:2] == ("D#", "major")


def test_a_single_tone_is_no_strong_key() -> None:
    estimate = estimate_key(tone(440, 20))
    assert estimate is not None
    assert estimate[2] < 0.2


# Nothing to find


@pytest.mark.parametrize(
    "samples",
    [
        *(noise(seconds, seed) for seconds in (4.5, 10, 70) for seed in range(2)),
        *(np.zeros(num_samples, np.float32) for num_samples in (0, 1, 1_600, 20 * SAMPLING_RATE)),
        noise(0.1),
    ],
)
def test_noise_silence_and_a_tenth_of_a_second_have_neither_tempo_nor_key(samples: Samples) -> None:
    assert measure(samples) == NOTHING


@pytest.mark.parametrize("frequency", [55, 97.3, 440, 3_000])
def test_a_steady_tone_has_no_pulse(frequency: float) -> None:
    assert estimate_tempo(tone(frequency, 20)) is None


@pytest.mark.parametrize("value", [1.0, 2.0**31])
def test_samples_of_any_size_are_measured(value: float) -> None:
    samples = chords(0, "major") * np.float32(value)
    assert measure(samples)["key"] == "C"


# The process


@contextlib.asynccontextmanager
async def running(measurer: Measurer) -> AsyncIterator[Measurer]:
    try:
        yield measurer
    finally:
        await measurer.close()


def hostile(timeout_seconds: float = 60) -> contextlib.AbstractAsyncContextManager[Measurer]:
    return running(
        Measurer(timeout_seconds=timeout_seconds, worker_module="tests.hostile_measurer")
    )


def ordering(order: int) -> Song:
    samples = drums(120, 5)
    samples[0] = order
    return song_of(samples)


def worker_pids() -> list[int]:
    return [
        process.pid
        for process in psutil.Process().children()
        if any("hostile_measurer" in part for part in process.cmdline())
    ]


def hears_a_song(pid: int) -> bool:
    """Whether a process has a song's samples in its memory."""
    with contextlib.suppress(OSError):
        return "memfd:samples" in Path(f"/proc/{pid}/maps").read_text()
    return False


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the kernel's processes raise no event
            await asyncio.sleep(0.02)


async def test_a_song_is_measured() -> None:
    samples = drums(120, 20) + chords(2, "major", 120, 20)
    samples.flags.writeable = False
    async with running(Measurer()) as measurer:
        measured = await measurer.measure(song_of(samples, -14.5))
    assert measured.duration_seconds == 20
    assert measured.loudness_lufs == -14.5
    assert measured.tempo_bpm in (pytest.approx(120, rel=0.01), pytest.approx(60, rel=0.01))
    assert (measured.key, measured.mode) == ("D", "major")
    assert measured.key_strength is not None


async def test_one_process_starts_with_the_first_song_and_measures_one_after_the_other() -> None:
    async with hostile() as measurer:
        assert not worker_pids()
        await measurer.measure(ordering(0))
        (pid,) = worker_pids()
        num_files = psutil.Process(pid).num_fds()  # perhaps with the song's: the answer goes first
        await asyncio.gather(*(measurer.measure(ordering(0)) for _ in range(10)))
        assert worker_pids() == [pid]
        assert psutil.Process(pid).num_fds() <= num_files
        assert not hears_a_song(pid)


@pytest.mark.parametrize(
    ("order", "timeout_seconds", "message"),
    [
        (CRASH, 60, "failed"),
        (SWALLOW, 60, "failed"),
        (EXHAUST, 60, "longer than is allowed"),
        (HANG, 3, "longer than is allowed"),
        (SPIN, 3, "longer than is allowed"),
    ],
)
async def test_a_process_that_breaks_fails_its_song_alone(
    order: int, timeout_seconds: float, message: str
) -> None:
    async with hostile(timeout_seconds) as measurer:
        await measurer.measure(ordering(0))
        broken_pids = worker_pids()
        with pytest.raises(NotMeasuredError, match=message) as caught:
            await measurer.measure(ordering(order))
        assert caught.value.code == "not_measured"
        assert (await measurer.measure(ordering(0))).tempo_bpm is not None
        assert len(worker_pids()) == 1
        assert worker_pids() != broken_pids


async def test_a_caller_that_leaves_ends_its_process_and_the_next_is_served() -> None:
    async with hostile() as measurer:
        await measurer.measure(ordering(0))
        (pid,) = worker_pids()
        worker = psutil.Process(pid)
        leaving = asyncio.create_task(measurer.measure(ordering(HANG)))
        next_one = asyncio.create_task(measurer.measure(ordering(0)))
        await wait_until(lambda: hears_a_song(pid))
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert leaving.cancelled()
        await wait_until(lambda: has_ended(worker), 1)
        assert (await next_one).tempo_bpm is not None


async def test_closing_ends_the_process_and_fails_who_waits_and_who_comes() -> None:
    async with hostile() as measurer:
        tasks = [asyncio.create_task(measurer.measure(ordering(HANG))) for _ in range(2)]
        await wait_until(lambda: any(map(hears_a_song, worker_pids())))
        await measurer.close()
        assert not worker_pids()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, NotMeasuredError) for result in results)
        with pytest.raises(NotMeasuredError, match="stopping"):
            await measurer.measure(ordering(0))
        assert not worker_pids()


async def test_closing_ends_a_process_that_still_starts() -> None:
    async with hostile() as measurer:
        task = asyncio.create_task(measurer.measure(ordering(0)))
        await wait_until(worker_pids)
        await measurer.close()
        assert not worker_pids()
        with pytest.raises(NotMeasuredError):
            await task


async def test_a_process_is_nice_knows_no_secrets_and_has_its_time_anew_for_each_song(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    async with hostile() as measurer:
        first, second = [
            json.loads((await measurer.measure(ordering(LOOK))).key or "") for _ in range(2)
        ]
    assert first["niceness"] == min(19, os.nice(0) + 10)
    assert first["secrets"] == []
    assert 64 < first["cpu_seconds_left"] <= 66  # of 60 and 5, in whole seconds of the process
    assert second["cpu_seconds_left"] > first["cpu_seconds_left"] - LOOKING_SECONDS + 0.25


async def test_a_process_ends_with_a_server_that_is_killed() -> None:
    program = """
import asyncio
from tests.test_measure import HANG, hostile, ordering
async def main():
    async with hostile() as measurer:
        await measurer.measure(ordering(HANG))
asyncio.run(main())
"""
    server = psutil.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        await wait_until(server.children)
        (worker,) = server.children()
        await wait_until(lambda: hears_a_song(worker.pid))
    finally:
        server.kill()
        server.wait()
    # An orphan is reaped by whatever runs as process 1, so a zombie counts as ended here.
    await wait_until(lambda: has_ended(worker), 10)


async def test_what_stands_behind_twenty_minutes_is_not_measured() -> None:
    samples = np.zeros(1210 * SAMPLING_RATE, np.float32)
    samples[1200 * SAMPLING_RATE :] = chords(0, "major", seconds=10)
    async with running(Measurer()) as measurer:
        measured = await measurer.measure(song_of(samples))
    assert (measured.duration_seconds, measured.key) == (1210, None)


async def test_measurements_that_end_well_or_badly_leave_no_file_open() -> None:
    before = psutil.Process().num_fds()
    async with hostile() as measurer:
        for order in (0, CRASH):
            await asyncio.gather(measurer.measure(ordering(order)), return_exceptions=True)
    await wait_until(lambda: psutil.Process().num_fds() == before)


# Disagreement


def measured(
    tempo_bpm: float | None = 120.0,
    key: str | None = "C",
    mode: Literal["major", "minor"] | None = "major",
    key_strength: float | None = 0.9,
) -> Measured:
    return Measured(200.0, tempo_bpm, key, mode, key_strength, -14.0)


@pytest.mark.parametrize("bpm", [120, 124, 116, 60, 58, 30, 240, 249, 480, 120.5])
def test_a_tempo_within_4_percent_of_an_octave_is_not_disputed(bpm: float) -> None:
    assert not disputes({"bpm": bpm}, measured())


@pytest.mark.parametrize("bpm", [126, 114, 80, 90, 180, 63, 57, 251, 960, 15])
def test_another_tempo_is_disputed(bpm: float) -> None:
    assert disputes({"bpm": bpm}, measured())


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (("C", "major"), ("C", "major")),
        (("Db", "major"), ("C#", "major")),
        (("Bb", "minor"), ("A#", "minor")),
        (("A", "minor"), ("C", "major")),  # the same notes
        (("C", "major"), ("A", "minor")),
        (("D", "dorian"), ("C", "major")),
        (("D", "dorian"), ("D", "minor")),  # the same home
        (("G", "mixolydian"), ("C", "major")),
        (("G", "mixolydian"), ("G", "major")),
        (("E", "other"), ("C", "major")),
        (("C", None), ("C", "minor")),
        (("A", None), ("C", "major")),
    ],
)
def test_the_same_key_by_name_or_by_notes_is_not_disputed(
    said: tuple[str, str | None], found: tuple[str, Literal["major", "minor"]]
) -> None:
    assert not disputes({"key": said[0], "mode": said[1]}, measured(key=found[0], mode=found[1]))


@pytest.mark.parametrize(
    ("key", "mode"),
    [
        ("G", "major"),
        ("C", "minor"),
        ("F#", "major"),
        ("E", "minor"),
        ("E", "dorian"),
        ("A", "mixolydian"),
        ("E", None),
    ],
)
def test_another_key_is_disputed(key: str, mode: str | None) -> None:
    assert disputes({"key": key, "mode": mode}, measured())


@pytest.mark.parametrize("key_strength", [0.59, 0.0, None])
def test_a_weak_estimate_of_the_key_disputes_nothing(key_strength: float | None) -> None:
    assert not disputes({"key": "F#", "mode": "major"}, measured(key_strength=key_strength))


@pytest.mark.parametrize(
    "data",
    [
        None,
        "120 BPM in F#",
        [],
        {},
        {"bpm": None, "key": None},
        {"bpm": True, "key": 7, "mode": "major"},
        {"bpm": "90", "key": "H", "mode": "major"},
        {"key": "F#", "mode": ["major"]},
        {"inside": {"bpm": 90, "key": "F#", "mode": "major"}},
    ],
)
def test_what_says_nothing_of_tempo_or_key_is_not_disputed(data: object) -> None:
    assert not disputes(data, measured())


def test_what_was_not_found_disputes_nothing() -> None:
    said = {"bpm": 90, "key": "F#", "mode": "major"}
    assert not disputes(said, measured(tempo_bpm=None, key=None, mode=None, key_strength=None))
    assert disputes(said, measured(tempo_bpm=None))
    assert disputes(said, measured(key=None, mode=None, key_strength=None))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"bpm": 90}, True),
        ({"key": "A", "mode": "minor"}, True),
        ({"tags": []}, False),
        ([], False),
    ],
)
def test_only_a_section_that_names_a_tempo_or_a_key_has_to_wait_for_the_measurement(
    data: object, expected: bool
) -> None:
    assert disputable(data) is expected
