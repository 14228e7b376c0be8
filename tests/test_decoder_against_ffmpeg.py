"""Our samples are those of ffmpeg's own decoding: every format, channel count and rate.

Both sides start from one file. Ours is PyAV with the plain mean of the channels and soxr; the other
is the ffmpeg program, a build of its own, with its `pan` filter for the same mean and its own
resampler. So decoders, mean and resampling are all compared; what stands close below 8 kHz, where
two resamplers may differ, is little in music.
"""

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import imageio_ffmpeg
import librosa
import numpy as np
import pytest
import pytest_asyncio

from adapter.decoder import DecoderPool
from tests.songs import Samples, encode, id3_tag, real_song

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = 6
MAX_LENGTH_SAMPLES = round(0.05 * 16_000)
MIN_CORRELATION = 0.999


@dataclass(frozen=True)
class Case:
    """A file that ffmpeg encodes from the song: its options, its ending, its shape."""

    arguments: str
    ending: str
    rate: int = 44_100
    num_channels: int = 2
    cut_bytes: int = 0  # taken from its end
    tag_bytes: int = 0  # of an ID3 tag with a cover before it


VIDEO = "-f lavfi -i testsrc=size=128x96:rate=5:duration=6 -map 0:a -map 1:v"
FORMATS = {
    "wav-8": Case("-c:a pcm_u8", "wav"),
    "wav-16": Case("-c:a pcm_s16le", "wav"),
    "wav-24": Case("-c:a pcm_s24le", "wav"),
    "wav-32": Case("-c:a pcm_s32le", "wav"),
    "wav-float": Case("-c:a pcm_f32le", "wav"),
    "wav-alaw": Case("-c:a pcm_alaw", "wav", 8_000, 1),
    "wav-rf64": Case("-c:a pcm_s16le -rf64 always", "wav"),
    "mp3-cbr": Case("-b:a 128k", "mp3"),
    "mp3-320k": Case("-b:a 320k", "mp3", 48_000),
    "mp3-vbr": Case("-q:a 3", "mp3"),
    "mp3-cover": Case("-b:a 192k", "mp3", tag_bytes=300_000),
    "mp3-truncated": Case("-b:a 192k", "mp3", cut_bytes=300),
    "flac": Case("-c:a flac", "flac"),
    "flac-24": Case("-c:a flac -sample_fmt s32", "flac", 96_000),
    "vorbis": Case("-c:a libvorbis -q:a 5", "ogg"),
    "opus": Case("-c:a libopus -b:a 128k", "opus", 48_000),
    "aac": Case("-c:a aac -b:a 160k", "m4a"),
    "alac": Case("-c:a alac", "m4a"),
    "aiff": Case("-c:a pcm_s24be", "aiff"),
    "wma": Case("-c:a wmav2 -b:a 160k", "wma"),
    "webm": Case(f"{VIDEO} -c:a libopus -b:a 128k -c:v libvpx", "webm", 48_000),
    "caf": Case("-c:a pcm_s24be", "caf"),
    "mp4-video": Case(f"{VIDEO} -c:a aac -b:a 160k -c:v libx264 -pix_fmt yuv420p", "mp4"),
}
CHANNELS = {
    f"{name}-{num_channels}ch": Case(
        FORMATS[name].arguments, FORMATS[name].ending, FORMATS[name].rate, num_channels
    )
    for name, counts in {
        "wav-16": (1, 6, 8),
        "wav-float": (1, 6, 8),
        "flac": (1, 6, 8),
        "alac": (1, 6, 7),
        "vorbis": (1, 6, 8),
        "aac": (1, 6, 8),
        "mp3-vbr": (1,),
        "wma": (1,),
        "aiff": (1, 6, 8),  # of eight channels, and CAF, as a list that names each
        "caf": (8,),
    }.items()
    for num_channels in counts
} | {
    "opus-1ch": Case("-c:a libopus -b:a 96k", "opus", 48_000, 1),
    "opus-6ch": Case("-c:a libopus -b:a 450k -mapping_family 1", "opus", 48_000, 6),
    "opus-8ch": Case("-c:a libopus -b:a 600k -mapping_family 1", "opus", 48_000, 8),
}
RATES = {
    f"{name}-{rate}": Case(FORMATS[name].arguments, FORMATS[name].ending, rate)
    for name, rates in {
        "wav-24": (8_000, 11_025, 16_000, 22_050, 32_000, 88_200, 176_400, 192_000),
        "flac": (8_000, 16_000, 48_000, 88_200, 192_000),
        "mp3-cbr": (16_000, 24_000, 32_000, 48_000),
        "vorbis": (8_000, 22_050, 48_000, 96_000),
        "aac": (16_000, 22_050, 48_000, 96_000),
        "alac": (8_000, 48_000, 192_000),
    }.items()
    for rate in rates
}
CASES = FORMATS | CHANNELS | RATES


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecoderPool]:
    pool = DecoderPool(1, max_audio_seconds=600)
    await pool.start()
    yield pool
    await pool.close()


def ffmpeg(*arguments: str) -> bytes:
    """The ffmpeg program's output. Raises CalledProcessError where it fails."""
    program = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-y", "-v", "error", *arguments]
    return subprocess.run(program, check=True, capture_output=True).stdout


@cache
def real_music() -> Samples:
    """A minute of a real song from its thirtieth second, stereo, 44.1 kHz."""
    raw = ffmpeg("-ss", "30", "-t", "60", "-i", str(real_song()), "-f", "f32le", "-")
    return np.frombuffer(raw, np.float32).reshape(-1, 2).T * 0.7


def music(rate: int, num_channels: int) -> Samples:
    """Each channel another place of the song, so that no two are alike."""
    width = SECONDS * 44_100
    starts = [5 * 44_100 * (index // 2) for index in range(num_channels)]
    channels = [
        real_music()[index % 2, start : start + width] for index, start in enumerate(starts)
    ]
    return librosa.resample(np.stack(channels), orig_sr=44_100, target_sr=rate, res_type="soxr_hq")


def write(case: Case, folder: Path) -> Path:
    source, path = folder / "source.wav", folder / f"song.{case.ending}"
    source.write_bytes(encode(music(case.rate, case.num_channels), "wav-float", rate=case.rate))
    ffmpeg("-i", str(source), *case.arguments.split(), str(path))
    data = path.read_bytes()
    path.write_bytes(id3_tag(case.tag_bytes) * bool(case.tag_bytes) + data)
    if case.cut_bytes:
        path.write_bytes(data[: -case.cut_bytes])
    return path


def decoded_by_ffmpeg(path: Path, num_channels: int) -> Samples:
    """The mean of the channels at 16 kHz, in floats throughout."""
    mean = "+".join(f"{1 / num_channels}*c{index}" for index in range(num_channels))
    filters = f"aformat=sample_fmts=fltp,pan=mono|c0={mean},aresample=16000"
    raw = ffmpeg("-i", str(path), "-map", "0:a:0", "-af", filters, "-f", "f32le", "-")
    return np.frombuffer(raw, np.float32)


def loudness_by_ffmpeg(path: Path) -> float:
    """The integrated loudness in LUFS, from the summary of its `ebur128` filter."""
    program = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-nostats", "-i", str(path)]
    filters = ["-af", "ebur128=framelog=quiet", "-f", "null", "-"]
    log = subprocess.run([*program, *filters], check=True, capture_output=True).stderr.decode()
    return float(re.findall(r"I: +(-[0-9.]+) LUFS", log)[-1])


def align(one: Samples, other: Samples) -> tuple[int, float]:
    """The shift in samples at which two songs are most alike, and their correlation there."""
    size = 2 * max(len(one), len(other))
    products = np.fft.irfft(np.fft.rfft(one, size) * np.fft.rfft(other, size).conj())
    shift = int(np.argmax(products))
    shift = shift - size if shift > size // 2 else shift
    one, other = one[max(0, shift) :], other[max(0, -shift) :]
    length = min(len(one), len(other))
    return shift, float(np.corrcoef(one[:length], other[:length])[0, 1])


@pytest.mark.parametrize("name", CASES)
async def test_a_file_has_the_samples_of_ffmpeg(
    pool: DecoderPool, name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    path = await asyncio.to_thread(write, case, tmp_path)
    with path.open("rb") as file:
        ours = (await pool.decode(file)).samples
    theirs = await asyncio.to_thread(decoded_by_ffmpeg, path, case.num_channels)
    shift, correlation = align(ours, theirs)
    print(
        f"{name}: correlation {correlation:.6f}, shift {shift},"
        f" {len(ours) - len(theirs):+d} samples, level {ours.std() / theirs.std():.4f}"
    )
    assert correlation > MIN_CORRELATION
    assert abs(shift) <= MAX_LENGTH_SAMPLES
    assert abs(len(ours) - len(theirs)) <= MAX_LENGTH_SAMPLES
    assert len(ours) == pytest.approx(SECONDS * 16_000, abs=1_600)
    assert ours.std() == pytest.approx(theirs.std(), rel=0.01)


async def test_a_real_song_is_as_loud_as_ffmpeg_says(pool: DecoderPool) -> None:
    with real_song().open("rb") as file:
        ours = (await pool.decode(file, measure_loudness=True)).loudness_lufs
    assert ours == pytest.approx(await asyncio.to_thread(loudness_by_ffmpeg, real_song()), abs=0.1)
