"""What every path is given, and what it gives back."""

import os
import re
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import av
import numpy as np
import numpy.typing as npt
from demo import QUESTIONS
from demo_song import write_song

RATE = 16_000  # Hz
MADE_SECONDS = 240.0
WARM_UP_SECONDS = 5.0
WARM_UP_PROMPT = "Is this a test?"
SECRET = re.compile(r"(^|_)(KEYS?|TOKENS?|SECRETS?|PASSWORD)(_|$)")

SongState = Literal["new", "known"]
Report = Callable[[int, str], None]  # prompts answered since the last call, what is done now


@dataclass(frozen=True)
class Workload:
    """The same prompts about the same songs for every path, answered greedily.

    A song is 16-bit mono WAV at 16 kHz: whoever reads it gets the same samples. Each repetition has
    a song of its own, or a cache would know it.
    """

    model: str  # a directory or a hub id
    revision: str
    songs: tuple[Path, ...]
    warm_up_song: Path
    prompts: tuple[str, ...]
    max_new_tokens: int
    dtype: str
    group_size: int

    @property
    def song_seconds(self) -> float:
        with wave.open(str(self.songs[0])) as file:
            return float(file.getnframes() / RATE)


@dataclass(frozen=True)
class Answer:
    """`num_tokens` counts the end-of-turn token; `token_ids` is None where a path has only text."""

    text: str
    num_tokens: int
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Run:
    """One pass over all prompts about one song, from the file on the disk to the last answer."""

    song_index: int
    song_state: SongState
    wall_seconds: float
    answers: tuple[Answer, ...]
    billed_seconds: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a path: its runs, or why there are none.

    `start_seconds` is the time until it was ready for its first prompt: imports and weights.
    """

    runs: tuple[Run, ...] = ()
    device: str | None = None
    start_seconds: float | None = None
    environment: dict[str, str] = field(default_factory=dict)
    error: str | None = None


def make_prompts(count: int) -> tuple[str, ...]:
    """The demo's questions; from the 14th on they repeat, numbered, so that no two are equal."""
    rounds = (divmod(index, len(QUESTIONS)) for index in range(count))
    return tuple(QUESTIONS[i] if not n else f"{QUESTIONS[i]} (Take {n + 1}.)" for n, i in rounds)


def make_songs(
    source: Path | None, seconds: float | None, repeats: int, folder: Path
) -> tuple[Path, ...]:
    """Write the song once for each repetition, differing in the lowest bits of one sample.

    `source` is any audio file, or None for a made song. Its length is cut to whole
    tenths of a second: transformers 5.19 fails on a clip that ends up to 20 ms past a window.
    """
    if source is None:
        source = folder / "made.wav"
        write_song(source, seconds=MADE_SECONDS if seconds is None else seconds)
    samples = decode(source)
    kept = len(samples) if seconds is None else min(len(samples), int(seconds * RATE))
    samples = samples[: kept - kept % (RATE // 10)]
    if not len(samples):
        raise ValueError(f"{source}: the song is shorter than a tenth of a second")
    return tuple(_write_variant(samples, index, folder) for index in range(repeats))


def make_warm_up_song(folder: Path) -> Path:
    path = folder / "warm-up.wav"
    write_song(path, seconds=WARM_UP_SECONDS, seed=1)
    return path


def decode(path: Path) -> npt.NDArray[np.int16]:
    """Samples of shape (num_samples,), mono at 16 kHz. Raises av.FFmpegError or ValueError."""
    resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
    with av.open(str(path)) as container:
        if not container.streams.audio:
            raise ValueError(f"{path}: there is no audio in this file")
        frames = [
            out.to_ndarray()[0]
            for frame in (*container.decode(audio=0), None)
            for out in resampler.resample(frame)
        ]
    return np.concatenate(frames)


def read_song(path: Path) -> npt.NDArray[np.float32]:
    """Samples of shape (num_samples,) in [-1, 1), as libsndfile reads them."""
    import soundfile  # type: ignore[import-untyped]

    samples: npt.NDArray[np.float32] = soundfile.read(str(path), dtype="float32")[0]
    return samples


def find_device() -> str:
    """Where torch computes here. Counting the GPUs makes no context, which would take memory."""
    import torch

    return "cuda" if torch.cuda.device_count() else "cpu"


def environment_of(prefixes: Sequence[str]) -> dict[str, str]:
    """The variables with one of the prefixes, secrets left out."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(tuple(prefixes)) and not SECRET.search(name)
    }


def _write_variant(samples: npt.NDArray[np.int16], index: int, folder: Path) -> Path:
    path = folder / f"song-{index}.wav"
    variant = samples.astype("<i2")
    variant[0] ^= index
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(variant.tobytes())
    return path
