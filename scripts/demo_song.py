"""A song without a download: drums, bass, chords and a tune, written as a WAV file.

python scripts/demo_song.py song.wav --seconds 90
"""

import argparse
import wave
from pathlib import Path

import numpy as np
import numpy.typing as npt

RATE = 16_000  # Hz
BEAT_SECONDS = 0.5  # 120 BPM
CHORDS = (
    (220.0, 261.6, 329.6),
    (174.6, 220.0, 261.6),
    (196.0, 246.9, 293.7),
    (164.8, 196.0, 246.9),
)

Samples = npt.NDArray[np.float64]


def song(seconds: float, *, seed: int = 0) -> Samples:
    """Samples of shape (16000 * seconds,), mono, in [-1, 1]; the seed chooses the tune."""
    tune = np.random.default_rng(seed)
    beats = [beat(index, tune) for index in range(int(np.ceil(seconds / BEAT_SECONDS)))]
    samples = np.concatenate(beats)[: int(seconds * RATE)]
    return np.asarray(samples / np.abs(samples).max())


def beat(index: int, tune: np.random.Generator) -> Samples:
    """A kick or a snare, the bass, the bar's chord, and a note of the tune."""
    chord = CHORDS[index // 4 % len(CHORDS)]
    drum = tone(55.0, decay=30.0) if index % 2 == 0 else noise(tune)
    chords = sum((tone(hertz, decay=3.0) for hertz in chord), start=np.zeros(beat_samples()))
    melody = tone(2 * float(tune.choice(chord)), decay=5.0)
    return drum + 0.5 * tone(chord[0] / 2, decay=4.0) + 0.2 * chords + 0.4 * melody


def beat_samples() -> int:
    return int(BEAT_SECONDS * RATE)


def tone(hertz: float, *, decay: float) -> Samples:
    """One struck note with two overtones, one beat long."""
    at_seconds = np.arange(beat_samples()) / RATE
    partials = [np.sin(2 * np.pi * k * hertz * at_seconds) / k for k in (1, 2, 3)]
    return np.asarray(np.exp(-decay * at_seconds) * np.sum(partials, axis=0))


def noise(generator: np.random.Generator) -> Samples:
    at_seconds = np.arange(beat_samples()) / RATE
    return np.asarray(np.exp(-25.0 * at_seconds) * generator.uniform(-0.5, 0.5, beat_samples()))


def write_song(path: Path, seconds: float, *, seed: int = 0) -> None:
    """Write the song as 16-bit mono WAV at 16 kHz."""
    samples = (song(seconds, seed=seed) * 32_000).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_song(args.path, args.seconds, seed=args.seed)


if __name__ == "__main__":
    main()
