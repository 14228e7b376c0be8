"""What can be measured of a song itself, in a process of its own, and what disagrees with it."""

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from adapter.decoder import Song, memory_file
from adapter.errors import NotMeasuredError, UnavailableError
from adapter.request import SAMPLING_RATE
from adapter.worker_pool import (
    WorkerCrashedError,
    WorkerPool,
    WorkerTooSlowError,
    worker_environment,
)

logger = logging.getLogger(__name__)

MAX_MEASURED_SECONDS = 1200  # of a song, from its start, for tempo and key
TEMPO_TOLERANCE = 0.04
MIN_KEY_STRENGTH = 0.6  # an estimate that is weaker disputes nothing

_START_SECONDS = 120.0  # Numba compiles for 20 of them where nothing is in its cache
_OCTAVES = (0.25, 0.5, 1.0, 2.0, 4.0)
_PITCH_CLASSES = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}
_ACCIDENTALS = {"": 0, "#": 1, "b": -1}
# How far above the home note the major key begins that has the mode's notes.
_MAJOR_ABOVE = {"major": 0, "minor": 3, "dorian": 10, "mixolydian": 5}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a song is, by estimate but for the duration and the loudness.

    `tempo_bpm` is None where no pulse is found, and may be half or double what a listener taps;
    `key` ("A", "F#": never flats) and `mode` where no note stands out. `key_strength` is from 0 to
    1: how well the song's notes correlate with the key's profile, less where another key fits
    nearly as well. `loudness_lufs` is that of adapter/loudness.py, None below its gate.
    """

    duration_seconds: float
    tempo_bpm: float | None
    key: str | None
    mode: Literal["major", "minor"] | None
    key_strength: float | None
    loudness_lufs: float | None


class Measurer:
    """Measures one song at a time, in a process of its own that is nice to the others.

    It starts with the first song and stays for the next. One that crashes, takes longer than
    `timeout_seconds` or whose caller leaves is replaced. `memory_limit_bytes` is what it may
    allocate beside its libraries. `worker_module` is what `python -m` runs; tests plant a hostile
    one.
    """

    def __init__(
        self,
        *,
        memory_limit_bytes: int = 2**30,
        timeout_seconds: float = 120.0,
        worker_module: str = "adapter.measure_worker",
    ) -> None:
        self._pool = WorkerPool(
            1,
            name="The process that measures",
            module=worker_module,
            limits=(memory_limit_bytes,),
            environment=measure_environment(),
            timeout_seconds=timeout_seconds,
            start_seconds=_START_SECONDS,
        )
        self._turn = asyncio.Lock()  # songs are copied for the process one at a time too

    async def measure(self, song: Song) -> Measured:
        """Raises NotMeasuredError where the process ends early or cannot be had."""
        async with self._turn:
            heard = song.samples[: MAX_MEASURED_SECONDS * SAMPLING_RATE]
            with await asyncio.to_thread(write_samples, heard) as file:
                estimates = await self._estimate(file.fileno())
        return Measured(
            duration_seconds=song.duration_seconds,
            loudness_lufs=song.loudness_lufs,
            **estimates,
        )

    async def close(self) -> None:
        """End the process; who waits gets NotMeasuredError. May be called twice."""
        await self._pool.close()

    async def _estimate(self, samples_fd: int) -> dict[str, Any]:
        try:
            return await self._pool.ask(b"measure", [samples_fd])
        except WorkerTooSlowError as error:
            logger.warning("A measurement %s", error)
            raise NotMeasuredError(
                "The song was not measured: it takes longer than is allowed."
            ) from None
        except WorkerCrashedError as error:
            logger.warning("A measurement %s", error)
            raise NotMeasuredError(
                "The song could not be measured: the process that does it failed."
            ) from None
        except UnavailableError as error:
            raise NotMeasuredError(f"The song was not measured. {error.message}") from error


def measure_environment() -> dict[str, str]:
    """One thread, no warnings about short songs, and Numba's cache where one is named."""
    cache = {name: os.environ[name] for name in ("NUMBA_CACHE_DIR",) if name in os.environ}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    return worker_environment() | threads | cache | {"PYTHONWARNINGS": "ignore"}


def write_samples(samples: npt.NDArray[np.float32]) -> BinaryIO:
    """A memory file of the samples, closed by who lets go of it."""
    with contextlib.ExitStack() as unfinished:
        file = unfinished.enter_context(memory_file())
        data = samples.data.cast("B") if len(samples) else memoryview(b"")
        while data:
            data = data[os.write(file.fileno(), data) :]
        unfinished.pop_all()
    return file


def disputable(data: object) -> bool:
    """Whether a section's data names what is measured; else there is nothing to wait for."""
    return isinstance(data, dict) and not data.keys().isdisjoint({"bpm", "key"})


def disputes(data: object, measured: Measured) -> bool:
    """Whether a section's `bpm`, or its `key` and `mode`, disagree with what was measured.

    What is missing, of another type, or was not measured disagrees with nothing.
    """
    if not isinstance(data, dict):
        return False
    return disputes_tempo(data.get("bpm"), measured) or disputes_key(
        data.get("key"), data.get("mode"), measured
    )


def disputes_tempo(bpm: object, measured: Measured) -> bool:
    """More than 4 % off, and as much from a half, a quarter, the double and its double."""
    if measured.tempo_bpm is None or isinstance(bpm, bool) or not isinstance(bpm, int | float):
        return False
    return all(
        abs(bpm / (measured.tempo_bpm * octave) - 1) > TEMPO_TOLERANCE for octave in _OCTAVES
    )


def disputes_key(key: object, mode: object, measured: Measured) -> bool:
    """Another key than a strong estimate, by name and by notes; Db is C#.

    A key with the very notes of the estimate is not disputed (A minor for C major, D dorian): which
    of them is home cannot be told from how often each note is heard. Where the mode is one that the
    estimate cannot name, or is missing, the same home note will do; the notes of "other" are not
    known, so it is never disputed.
    """
    said, home = pitch_class(key), pitch_class(measured.key)
    if said is None or home is None or measured.mode is None:
        return False
    if (measured.key_strength or 0.0) < MIN_KEY_STRENGTH:
        return False
    if said == home and mode not in ("major", "minor"):
        return False
    modes = ("major", "minor") if mode is None else (mode,)
    notes = (home + _MAJOR_ABOVE[measured.mode]) % 12
    return all(
        isinstance(mode, str) and mode in _MAJOR_ABOVE and (said + _MAJOR_ABOVE[mode]) % 12 != notes
        for mode in modes
    )


def pitch_class(key: object) -> int | None:
    """Semitones above C of a name such as "F#" or "Bb"; None for what is no such name."""
    if not isinstance(key, str) or key[:1] not in _PITCH_CLASSES or key[1:] not in _ACCIDENTALS:
        return None
    return (_PITCH_CLASSES[key[:1]] + _ACCIDENTALS[key[1:]]) % 12
