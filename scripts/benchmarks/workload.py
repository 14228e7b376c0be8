"""What every path is given, and what it gives back."""

import json
import os
import re
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
import numpy.typing as npt
from demo import QUESTIONS
from demo_song import write_song

RATE = 16_000  # Hz
MADE_SECONDS = 240.0
WARM_UP_SECONDS = 5.0
WARM_UP_PROMPT = "Is this a test?"
MP3_RATE = 44_100  # Hz
MP3_BIT_RATE = 192_000
SHIFT_SAMPLES = RATE // 100  # between one song and the next
# Read by vLLM and its libraries where they are not set: a small machine keeps no core from the
# engine, and nobody is told of the run.
ENVIRONMENT = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
DEMO_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
SHAPES = ("tiny", "small")
FORMATS = ("wav", "mp3")
SECRET = re.compile(r"(^|_)(KEYS?|TOKENS?|SECRETS?|PASSWORD)(_|$)")

SongState = Literal["new", "known"]
Report = Callable[[int, str], None]  # prompts answered since the last call, what is done now


@dataclass(frozen=True)
class Workload:
    """The same prompts about the same songs for every path, answered greedily.

    A song is 16-bit mono WAV at 16 kHz, of which whoever reads it gets the same samples, or MP3.
    The songs of a round are asked about at once. Each repetition is a round with songs of its own,
    or a cache would know them.
    """

    model: str  # a directory or a hub id
    revision: str
    rounds: tuple[tuple[Path, ...], ...]
    warm_up_song: Path
    prompts: tuple[str, ...]
    max_new_tokens: int
    dtype: str
    group_size: int | None  # the adapter's; None for its default
    hf_group_size: int  # rows of a group of Hugging Face's

    @cached_property
    def song_seconds(self) -> float:
        return len(read_song(self.rounds[0][0])) / RATE

    @property
    def num_prompts_a_round(self) -> int:
        return len(self.prompts) * len(self.rounds[0])


@dataclass(frozen=True)
class Answer:
    """`num_tokens` counts the end-of-turn token; `token_ids` is None where a path has only text."""

    text: str
    num_tokens: int
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Run:
    """One pass over all prompts about the songs of a round, from their files to the last answer.

    The answers are those about the first song, in the order of the prompts, then the next song's.
    """

    round_index: int
    song_state: SongState
    wall_seconds: float
    answers: tuple[Answer, ...]
    billed_seconds: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a path: its runs, or why there are none.

    `start_seconds` is the time until it was ready for its first prompt: imports and weights.
    `peak_bytes` is the most memory that the process that runs torch had (see memory.py).
    """

    runs: tuple[Run, ...] = ()
    device: str | None = None
    start_seconds: float | None = None
    peak_bytes: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    def __add__(self, later: "Outcome") -> "Outcome":
        """With the runs of a later start, and what that says of the path."""
        peaks = [peak for peak in (self.peak_bytes, later.peak_bytes) if peak is not None]
        return replace(
            later,
            runs=self.runs + later.runs,
            peak_bytes=max(peaks, default=None),
            error=self.error or later.error,
        )


def make_prompts(count: int) -> tuple[str, ...]:
    """The demo's questions; from the 14th on they repeat, numbered, so that no two are equal."""
    rounds = (divmod(index, len(QUESTIONS)) for index in range(count))
    return tuple(QUESTIONS[i] if not n else f"{QUESTIONS[i]} (Take {n + 1}.)" for n, i in rounds)


def make_songs(
    source: Path | None, seconds: float | None, count: int, folder: Path, form: str = "wav"
) -> tuple[Path, ...]:
    """Write the song so many times, each time begun a hundredth of a second later, the beginning
    put to the end: to every cache another song, and to every path the same work.

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
    write = {"wav": write_wav, "mp3": write_mp3}[form]
    paths = tuple(folder / f"song-{index}.{form}" for index in range(count))
    for index, path in enumerate(paths):
        write(path, np.roll(samples, -index * SHIFT_SAMPLES))
    return paths


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
    """Samples of shape (num_samples,), mono at 16 kHz: of a WAV file as libsndfile reads them, of
    another one the mean of the channels, resampled by soxr as `librosa.load` does."""
    if path.suffix != ".wav":
        return decode_with_soxr(path)
    import soundfile  # type: ignore[import-untyped]

    samples: npt.NDArray[np.float32] = soundfile.read(str(path), dtype="float32")[0]
    return samples


def decode_with_soxr(path: Path) -> npt.NDArray[np.float32]:
    import soxr  # type: ignore[import-untyped]

    planes = av.AudioResampler(format="fltp")
    with av.open(str(path)) as container:
        rate = container.streams.audio[0].rate
        frames = [
            out.to_ndarray()
            for frame in container.decode(audio=0)
            for out in planes.resample(frame)
        ]
    mono = np.concatenate(frames, axis=1).mean(axis=0)
    samples: npt.NDArray[np.float32] = soxr.resample(mono, rate, RATE, quality="HQ")
    return samples


def make_model(shape: str, folder: Path) -> str:
    """Write the demo checkpoint of a shape, whose answers all run to their caps here; returns its
    directory."""
    from adapter.random_model import SMALL, TINY, write_random_model

    directory = folder / f"demo-{shape}"
    write_random_model(directory, shape={"tiny": TINY, "small": SMALL}[shape])
    forget_the_end(directory)
    return str(directory)


def forget_the_end(directory: Path) -> None:
    """Make the logits of the tokens that end an answer zero: another is always better."""
    from safetensors.torch import load_file, save_file

    weights_file = directory / "model.safetensors"
    weights = load_file(weights_file)
    settings = json.loads((directory / "generation_config.json").read_text())
    weights["language_model.lm_head.weight"][settings["eos_token_id"]] = 0
    save_file(weights, weights_file, metadata={"format": "pt"})


def prepare_environment(*, demo: bool) -> None:
    """Set what the libraries read and the caller has not set."""
    for name, value in (ENVIRONMENT | (DEMO_ENVIRONMENT if demo else {})).items():
        os.environ.setdefault(name, value)


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


def write_wav(path: Path, samples: npt.NDArray[np.int16]) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.astype("<i2").tobytes())


def write_mp3(path: Path, samples: npt.NDArray[np.int16]) -> None:
    """As songs are usually had: stereo, 44.1 kHz, 192 kbit/s."""
    frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = RATE, 0, Fraction(1, RATE)
    resampler = av.AudioResampler(format="fltp", layout="stereo", rate=MP3_RATE)
    with av.open(str(path), "w", format="mp3") as container:
        stream: Any = container.add_stream("libmp3lame", rate=MP3_RATE)
        stream.layout, stream.format, stream.bit_rate = "stereo", "fltp", MP3_BIT_RATE
        for given in (frame, None):
            for out in resampler.resample(given):
                container.mux(stream.encode(out))
        container.mux(stream.encode(None))
