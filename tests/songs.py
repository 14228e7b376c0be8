"""Audio files for tests: made with FFmpeg's encoders (PyAV) and NumPy, and one real song."""

import io
import struct
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.floating[Any]]

_REAL_SONGS = Path("/usr/share/games/frozen-bubble/snd")
_LAYOUTS = {1: "mono", 2: "stereo", 3: "2.1", 4: "quad", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
_SCALES = {"u8": 128.0, "s16": 2.0**15, "s32": 2.0**31, "flt": 1.0, "dbl": 1.0}
_DTYPES = {"u8": np.uint8, "s16": np.int16, "s32": np.int32, "flt": np.float32, "dbl": np.float64}


@dataclass(frozen=True)
class Format:
    """How a song is written: a muxer, an encoder and the encoder's sample format."""

    container: str
    codec: str
    sample_format: str
    lossless: bool = False
    rate: int = 44_100
    options: tuple[tuple[str, str], ...] = ()
    video: bool = False
    bit_rate: int | None = None


FORMATS = {
    "wav-u8": Format("wav", "pcm_u8", "u8"),
    "wav-16": Format("wav", "pcm_s16le", "s16", lossless=True),
    "wav-24": Format("wav", "pcm_s24le", "s32", lossless=True),
    "wav-24-96k": Format("wav", "pcm_s24le", "s32", lossless=True, rate=96_000),
    "wav-32": Format("wav", "pcm_s32le", "s32", lossless=True),
    "wav-float": Format("wav", "pcm_f32le", "flt", lossless=True),
    "wav-double": Format("wav", "pcm_f64le", "dbl", lossless=True),
    "wav-alaw": Format("wav", "pcm_alaw", "s16", rate=8_000),
    "wav-mulaw": Format("wav", "pcm_mulaw", "s16", rate=8_000),
    "rf64": Format("wav", "pcm_s16le", "s16", lossless=True, options=(("rf64", "always"),)),
    "w64": Format("w64", "pcm_s16le", "s16", lossless=True),
    "aiff": Format("aiff", "pcm_s16be", "s16", lossless=True),
    "au": Format("au", "pcm_s16be", "s16", lossless=True),
    "caf": Format("caf", "pcm_s24le", "s32", lossless=True),
    "flac": Format("flac", "flac", "s16", lossless=True),
    "flac-24": Format("flac", "flac", "s32", lossless=True, rate=192_000),
    "flac-ogg": Format("ogg", "flac", "s16", lossless=True),
    "alac": Format("ipod", "alac", "s16p", lossless=True),
    "wavpack": Format("wv", "wavpack", "fltp", lossless=True),
    "tta": Format("tta", "tta", "s16", lossless=True),
    "mp3": Format("mp3", "libmp3lame", "fltp"),
    "mp3-320k": Format("mp3", "libmp3lame", "fltp", rate=48_000, bit_rate=320_000),
    "mp2": Format("mp2", "mp2", "s16"),
    "ogg-vorbis": Format("ogg", "vorbis", "fltp"),
    "opus": Format("ogg", "libopus", "flt", rate=48_000),
    "webm-opus": Format("webm", "libopus", "flt", rate=48_000),
    "mka-flac": Format("matroska", "flac", "s16", lossless=True),
    "m4a": Format("ipod", "aac", "fltp"),
    "aac-adts": Format("adts", "aac", "fltp"),
    "mp4-video": Format("mp4", "aac", "fltp", video=True),
    "wma": Format("asf", "wmav2", "fltp", bit_rate=128_000),
    "ac3": Format("ac3", "ac3", "fltp", rate=48_000),
    "avi-mp3": Format("avi", "libmp3lame", "fltp"),
}


def real_song() -> Path:
    """A real song of more than five minutes, Ogg Vorbis, stereo, 44.1 kHz."""
    path = _REAL_SONGS / "frozen-mainzik-1p.ogg"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; install the Debian package frozen-bubble-data, which holds it"
        )
    return path


def melody(seconds: float, rate: int = 44_100, num_channels: int = 2, seed: int = 0) -> Samples:
    """A song of float64 samples, shape (num_channels, num_samples): chords under a pulse, noise.

    Each channel has its own notes, and nothing reaches above 3 kHz, so that every codec and a rate
    of 8 kHz keep it.
    """
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    channels = [chord(time, rng.uniform(110, 700, size=5)) for _ in range(num_channels)]
    pulse = 0.55 + 0.45 * np.sin(2 * np.pi * 1.7 * time) * np.sin(2 * np.pi * 0.31 * time)
    return np.stack(channels) * pulse * 0.7


def chord(time: Samples, frequencies: Samples) -> Samples:
    overtones = ((f * n, 1 / n) for f in frequencies for n in (1, 2, 4))
    waves = [a * np.sin(2 * np.pi * f * time + f) for f, a in overtones]
    return np.sum(waves, axis=0) / (2 * len(frequencies))


def encode(samples: Samples, form: Format | str, *, rate: int | None = None) -> bytes:
    """Encode samples of shape (num_channels, num_samples), full scale ±1, to a file's bytes."""
    form = FORMATS[form] if isinstance(form, str) else form
    file = io.BytesIO()
    with av.open(file, "w", format=form.container, options=dict(form.options)) as container:
        picture = container.add_stream("mpeg4", rate=5) if form.video else None
        stream: Any = container.add_stream(form.codec, rate=rate or form.rate)
        stream.layout = _LAYOUTS[len(samples)]
        stream.format = form.sample_format
        stream.codec_context.options = {"strict": "experimental"}  # FFmpeg's own Vorbis encoder
        if form.bit_rate:
            stream.bit_rate = form.bit_rate
        if picture:
            write_pictures(container, picture)
        container.mux(stream.encode(as_frame(samples, form.sample_format, rate or form.rate)))
        container.mux(stream.encode(None))
    return file.getvalue()


def as_frame(samples: Samples, sample_format: str, rate: int) -> av.AudioFrame:
    """One interleaved frame of all the samples, which PyAV cuts to an encoder's liking."""
    packed = sample_format.removesuffix("p")
    frame = av.AudioFrame.from_ndarray(
        quantize(samples, packed), format=packed, layout=_LAYOUTS[len(samples)]
    )
    frame.sample_rate = rate
    frame.time_base = Fraction(1, rate)
    frame.pts = 0
    return frame


def quantize(samples: Samples, packed: str) -> npt.NDArray[Any]:
    """Samples as FFmpeg's packed sample format has them: interleaved in one row."""
    scaled = samples * _SCALES[packed] + (128 if packed == "u8" else 0)
    if packed in ("u8", "s16", "s32"):
        limits = np.iinfo(_DTYPES[packed])
        scaled = np.clip(np.rint(scaled), limits.min, limits.max)
    return np.ascontiguousarray(scaled.astype(_DTYPES[packed]).T.reshape(1, -1))


def write_pictures(container: Any, stream: Any) -> None:
    stream.width = stream.height = 64
    stream.pix_fmt = "yuv420p"
    for index in range(10):
        frame = av.VideoFrame.from_ndarray(
            np.full((64, 64, 3), 20 * index, dtype=np.uint8), format="rgb24"
        )
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def wav_header(
    num_data_bytes: int,
    *,
    rate: int = 44_100,
    num_channels: int = 2,
    bits: int = 16,
    codec: int = 1,
) -> bytes:
    """A WAV header that may claim anything."""
    frame_bytes = num_channels * bits // 8
    form = struct.pack(
        "<HHIIHH",
        codec,
        num_channels,
        rate,
        rate * frame_bytes & 0xFFFFFFFF,
        frame_bytes & 0xFFFF,
        bits,
    )
    size = min(num_data_bytes + 36, 0xFFFFFFFF)
    return (
        b"RIFF"
        + struct.pack("<I", size)
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + form
        + (b"data" + struct.pack("<I", min(num_data_bytes, 0xFFFFFFFF)))
    )


def id3_tag(num_picture_bytes: int) -> bytes:
    """An ID3v2.3 tag with a title in broken UTF-8 and a cover of so many bytes."""
    title = b"\x03" + b"\xff\xfe\x80 title"
    picture = b"\x00image/png\x00\x03\x00" + b"\x89PNG\r\n\x1a\n" + bytes(num_picture_bytes)
    body = id3_frame(b"TIT2", title) + id3_frame(b"APIC", picture)
    size = bytes(len(body) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x03\x00\x00" + size + body


def id3_frame(name: bytes, content: bytes) -> bytes:
    return name + struct.pack(">IH", len(content), 0) + content
