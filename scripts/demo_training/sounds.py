"""The sounds that made songs consist of: notes of clearly different timbre, and drums."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

RATE_HZ = 16_000
HIGHEST_HZ = 7_600  # partials above it are left out
RELEASE_SECONDS = 0.02

Samples = npt.NDArray[np.float32]
Drum = Literal["kick", "snare", "hat", "crash"]


@dataclass(frozen=True, slots=True)
class Timbre:
    """`partials` are (multiple of the fundamental, amplitude); `decay` is the loudness lost a
    second, in nepers; the vibrato's depth is a share of the pitch."""

    partials: tuple[tuple[float, float], ...]
    attack_seconds: float
    decay: float
    vibrato_hz: float = 0.0
    vibrato_depth: float = 0.0


TIMBRES = {
    "flute": Timbre(((1, 1.0), (2, 0.12)), 0.06, 0.3, 5.0, 0.004),
    "violin": Timbre(tuple((k, 1 / k) for k in range(1, 8)), 0.08, 0.0, 6.0, 0.008),
    "guitar": Timbre(tuple((k, 0.9**k) for k in range(1, 8)), 0.003, 9.0),
    "trumpet": Timbre(
        ((1, 0.4), (2, 0.9), (3, 1.0), (4, 0.8), (5, 0.5), (6, 0.3)), 0.03, 0.2, 0.0, 0.0
    ),
    "organ": Timbre(((0.5, 0.8), (1, 0.9), (4, 0.6), (8, 0.4)), 0.01, 0.0),
    "bell": Timbre(((1, 0.5), (2.76, 1.0), (5.4, 0.7)), 0.002, 3.0),
    "piano": Timbre(((1, 1.0), (2, 0.5), (3, 0.25), (4, 0.12)), 0.004, 4.0),
    "bass": Timbre(((1, 1.0), (2, 0.6), (3, 0.4), (4, 0.2)), 0.006, 2.5),
}
LEADS = ("flute", "violin", "guitar", "trumpet", "organ", "bell")


@cache
def note(instrument: str, pitch: int, seconds: float) -> Samples:
    """One note of shape (seconds * 16000,), its root mean square about 0.3; `pitch` is MIDI's.

    The array is shared: read only.
    """
    timbre = TIMBRES[instrument]
    hertz = 440.0 * 2 ** ((pitch - 69) / 12)
    time = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    wave = sum(
        amplitude * np.sin(multiple * _phase(timbre, hertz, time))
        for multiple, amplitude in timbre.partials
        if multiple * hertz < HIGHEST_HZ
    )
    loudness = np.sqrt(sum(amplitude**2 for _, amplitude in timbre.partials))
    return _frozen(0.42 * wave * _envelope(timbre, time) / loudness)


@cache
def drum(kind: Drum) -> Samples:
    """One stroke; the array is shared: read only."""
    time = np.arange(RATE_HZ) / RATE_HZ
    hiss = np.random.default_rng(0).uniform(-1.0, 1.0, len(time))
    bright = np.diff(hiss, prepend=0.0)
    strokes = {
        "kick": np.sin(2 * np.pi * (45 * time + 4 * (1 - np.exp(-20 * time)))) * np.exp(-14 * time),
        "snare": 0.6 * hiss * np.exp(-22 * time),
        "hat": 0.5 * bright * np.exp(-60 * time),
        "crash": 0.5 * bright * np.exp(-4 * time),
    }
    audible = int(RATE_HZ * {"kick": 0.35, "snare": 0.25, "hat": 0.1, "crash": 1.0}[kind])
    return _frozen(strokes[kind][:audible])


def _phase(timbre: Timbre, hertz: float, time: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    phase = 2 * np.pi * hertz * time
    if not timbre.vibrato_hz:
        return phase
    swing = timbre.vibrato_depth * hertz / timbre.vibrato_hz
    return np.asarray(phase + swing * np.sin(2 * np.pi * timbre.vibrato_hz * time))


def _envelope(timbre: Timbre, time: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    attack = np.minimum(time / timbre.attack_seconds, 1.0)
    left = (len(time) / RATE_HZ - time) / RELEASE_SECONDS
    return np.asarray(attack * np.exp(-timbre.decay * time) * np.minimum(left, 1.0))


def _frozen(samples: npt.NDArray[np.float64]) -> Samples:
    shared = samples.astype(np.float32)
    shared.setflags(write=False)
    return shared
