"""One decoder process: encoded bytes in, mono float32 samples at 16 kHz out.

Run by adapter/decoder.py as `python -m adapter.decoder_worker FD MAX_AUDIO_SECONDS MEMORY_BYTES
CPU_SECONDS`, where FD is one end of a socket pair. A message on it, `decode` or `measure` (the
loudness too), brings two file descriptors, of the encoded bytes and of an empty file for the
samples; the answer is one line of JSON, either {"num_samples", "duration_seconds", "loudness_lufs"}
or {"error", "code", "message"}.

FFmpeg reads bytes that strangers wrote, so this process holds nothing worth having: no keys, no
model, few descriptors, little memory, bounded time. It ends with the server, however that ends.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import IO, Any, cast

import av
import av.logging
import numpy as np
import numpy.typing as npt
import soxr  # type: ignore[import-untyped]
from av.audio.codeccontext import AudioCodecContext
from av.audio.fifo import AudioFifo
from av.audio.frame import AudioFrame
from av.audio.layout import AudioLayout
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet

from adapter.errors import AdapterError, NotAudioError, UnprocessableError
from adapter.loudness import Loudness
from adapter.request import SAMPLING_RATE

MIN_SAMPLING_RATE = 1_000  # Hz; below, a few bytes unpack to hours
MAX_SAMPLING_RATE = 768_000  # Hz; the highest that PCM equipment knows
MAX_CHANNELS = 32
MIN_DAMAGED_SECONDS = 0.1  # less than this from a damaged file is noise taken for audio
MAX_VALUES_PER_SECOND = 384_000  # as 192 kHz in stereo has, or 48 kHz in eight channels
MAX_AMPLITUDE = 2.0**31  # float files scaled like int32 are kept; beyond, sums leave float32

_BLOCK_VALUES = 2**20  # samples of all channels that are turned to mono at once
_OPEN_CPU_SECONDS = 3  # FFmpeg's list of tags takes the square of their number
_MAX_OPEN_FILES = 16
_CUSTOM_ORDER = 2  # of enum AVChannelOrder in libavutil/channel_layout.h
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Demuxers that read one file only: no playlists (hls, dash, concat), no devices, no image series.
# None whose streams appear while it is read (mpegts, mpeg, flv): PyAV 18.1 then reads past the end
# of an array in `demux`.
_FORMATS = "wav,w64,aiff,au,caf,mp3,flac,ogg,mov,matroska,webm,asf,aac,ac3,eac3,amr,ape,wv,tta,avi"
# Audio decoders alone: FFmpeg would otherwise run video decoders to probe a video's streams.
_CODECS = (
    "pcm_alaw,pcm_mulaw,pcm_u8,pcm_s8,pcm_s8_planar,pcm_s16le,pcm_s16be,pcm_s16le_planar,"
    "pcm_s16be_planar,pcm_s24le,pcm_s24be,pcm_s24le_planar,pcm_s32le,pcm_s32be,pcm_s32le_planar,"
    "pcm_s64le,pcm_s64be,"
    "pcm_f32le,pcm_f32be,pcm_f64le,pcm_f64be,adpcm_ms,adpcm_ima_wav,adpcm_ima_qt,"
    "mp3float,mp3,mp2float,mp2,mp1float,mp1,flac,vorbis,opus,libopus,aac,aac_latm,alac,"
    "wmav1,wmav2,wmapro,wmalossless,ac3,eac3,ape,wavpack,tta,speex,amrnb,amrwb"
)
# A WAV comes in packets of 64 KiB rather than 4, which take Python less than half the time; FFmpeg
# would read 2,500 of them first, to find out whether its PCM is another codec's stream.
_CONTAINER_OPTIONS = {
    "format_whitelist": _FORMATS,
    "codec_whitelist": _CODECS,
    "max_size": "65536",
    "max_probe_packets": "1",
}


class DescriptorReader:
    """A file descriptor as the file object that PyAV reads.

    It has a position of its own (`pread`), since the descriptor's is shared with the server, and no
    name, so that no file name can suggest a format.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._position = 0
        self._num_bytes = os.fstat(fd).st_size

    def read(self, num_bytes: int) -> bytes:
        data = os.pread(self._fd, num_bytes, self._position)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        if base + offset < 0:
            return -1  # FFmpeg's error; an exception would end the decoding
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position


class SampleWriter:
    """Resamples mono blocks to 16 kHz as they come, and appends them to a descriptor.

    The filter is soxr's HQ and the length ceil(n * 16000 / rate), as in `librosa.resample` with
    `soxr_hq`. A change of rate in the middle of a file ends one stretch and begins another.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rate = 0
        self._resampler: Any = None
        self._num_in = 0  # samples of this stretch, at its own rate
        self._num_out = 0  # samples of this stretch, at 16 kHz
        self._finished_seconds = 0.0  # of the stretches before this one
        self.num_samples = 0

    @property
    def duration_seconds(self) -> float:
        return self._finished_seconds + (self._num_in / self._rate if self._rate else 0.0)

    def write(self, mono: npt.NDArray[np.float32], rate: int) -> None:
        if rate != self._rate:
            self._begin_stretch(rate)
        self._num_in += len(mono)
        self._resample(mono, last=False)

    def finish(self) -> None:
        """End the stretch: what the filter still holds is written, to the exact length."""
        if not self._rate:
            return
        self._resample(np.zeros(0, dtype=np.float32), last=True)
        self._append(np.zeros(self._num_expected - self._num_out, dtype=np.float32))
        self._finished_seconds += self._num_in / self._rate
        self._rate = self._num_in = self._num_out = 0

    @property
    def _num_expected(self) -> int:
        return math.ceil(self._num_in * (SAMPLING_RATE / self._rate))  # librosa's very formula

    def _begin_stretch(self, rate: int) -> None:
        self.finish()
        self._rate = rate
        self._resampler = None
        if rate != SAMPLING_RATE:
            self._resampler = soxr.ResampleStream(rate, SAMPLING_RATE, 1, "float32", "HQ")

    def _resample(self, block: npt.NDArray[np.float32], *, last: bool) -> None:
        if self._resampler is not None:
            block = self._resampler.resample_chunk(block, last=last)
        self._append(block[: self._num_expected - self._num_out])

    def _append(self, samples: npt.NDArray[np.float32]) -> None:
        data = memoryview(samples.tobytes())
        while data:
            data = data[os.write(self._fd, data) :]
        self._num_out += len(samples)
        self.num_samples += len(samples)


def decode(
    encoded_fd: int, samples_fd: int, max_audio_seconds: float, measure_loudness: bool = False
) -> dict[str, Any]:
    """Decode the first audio track of a file to mono float32 samples at 16 kHz.

    The bytes decide what the file is. Mono is the plain mean of the channels. Samples that are no
    numbers or infinite become 0. A packet that cannot be decoded is left out, and what stands
    before a broken end is kept, as players do; but a damaged file counts only if more than
    `MIN_DAMAGED_SECONDS` of it, and more packets than not, decode.

    Raises NotAudioError, and UnprocessableError where a limit is passed.
    """
    writer = SampleWriter(samples_fd)
    loudness = Loudness() if measure_loudness else None
    damage = Damage()
    num_values = 0
    with open_container(encoded_fd) as container:
        for block in join_frames(audio_frames(container, damage)):
            seconds = writer.duration_seconds + block.samples / block.sample_rate
            num_values += block.samples * block.layout.nb_channels
            check_size(seconds, num_values, max_audio_seconds)
            channels = finite_channels(block)
            writer.write(to_mono(channels), block.sample_rate)
            if loudness:
                loudness.write(channels, block.sample_rate, block.layout.name)
    writer.finish()
    if writer.num_samples == 0 or damage.outweighs(writer.duration_seconds):
        raise NotAudioError("The file holds no audio that can be decoded.")
    return {
        "num_samples": writer.num_samples,
        "duration_seconds": writer.duration_seconds,
        "loudness_lufs": loudness.finish() if loudness else None,
    }


def open_container(fd: int) -> InputContainer:
    try:
        # PyAV asks for `read`, `seek` and `tell` only. Tags are never read, so their encoding
        # must not matter.
        with cpu_limit(_OPEN_CPU_SECONDS):
            return av.open(
                cast(IO[bytes], DescriptorReader(fd)),
                mode="r",
                container_options=_CONTAINER_OPTIONS,
                metadata_errors="replace",
            )
    except (av.error.FFmpegError, ValueError) as error:
        raise_if_memory(error)
        raise NotAudioError(
            "The file is in no audio format that is known here; send WAV, FLAC, MP3, OGG, Opus or"
            " M4A."
        ) from error


class Damage:
    """Counts what decoded and what did not."""

    def __init__(self) -> None:
        self.good_packets = 0
        self.bad_packets = 0

    def outweighs(self, seconds: float) -> bool:
        if not self.bad_packets:
            return False
        return seconds <= MIN_DAMAGED_SECONDS or self.bad_packets > self.good_packets


def audio_frames(container: InputContainer, damage: Damage) -> Iterator[AudioFrame]:
    stream = first_audio_stream(container)
    for packet in read_packets(container, stream, damage):
        try:
            frames = stream.codec_context.decode(packet)
        except (av.error.FFmpegError, ValueError) as error:
            raise_if_memory(error)
            damage.bad_packets += 1
            continue
        damage.good_packets += packet is not None
        refuse_custom_layouts(frames)
        yield from frames


def read_packets(
    container: InputContainer, stream: AudioStream, damage: Damage
) -> "Iterator[Packet[AudioStream] | None]":
    """The packets, as far as the container can be read, and None, which drains the decoder."""
    try:
        yield from (packet for packet in container.demux(stream) if packet.size)
    except (av.error.FFmpegError, ValueError, IndexError) as error:
        raise_if_memory(error)
        damage.bad_packets += 1
    yield None


def first_audio_stream(container: InputContainer) -> AudioStream:
    for stream in container.streams.audio:
        context = stream.codec_context
        if context is None or context.codec.name not in _CODECS.split(","):
            continue
        num_channels = replace_custom_layout(context)
        if context.sample_rate and num_channels:  # unknown until a frame, in some containers
            check_shape(context.sample_rate, num_channels)
        context.thread_count = 1
        return stream
    raise NotAudioError("The file holds no audio track that can be decoded.")


def is_custom(layout: AudioLayout) -> bool:
    """Whether FFmpeg holds the layout as a list of its own, AV_CHANNEL_ORDER_CUSTOM.

    PyAV (18.1) copies the pointer to that list wherever it copies a layout, and each copy frees it.
    It does not tell the order either: that is the first field behind the object's head.
    """
    order = ctypes.c_int.from_address(id(layout) + object.__basicsize__)
    return order.value == _CUSTOM_ORDER


def replace_custom_layout(context: AudioCodecContext) -> int:
    """Have the decoder know the number of channels alone, which is returned; 0 is unknown.

    Where they are in the room does not matter here. The list is then freed with `layout`, once.
    """
    layout = context.layout
    if is_custom(layout):
        context.layout = f"{layout.nb_channels} channels"
    return layout.nb_channels


def refuse_custom_layouts(frames: Sequence[AudioFrame]) -> None:
    """Refuse frames to which the decoder itself gave such a layout; Python never frees theirs."""
    layouts = [frame.layout for frame in frames if is_custom(frame.layout)]
    for layout in layouts:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(layout))
    if layouts:
        raise NotAudioError(
            "The audio has channels in an order that cannot be decoded; send it in stereo."
        )


def check_shape(rate: int, num_channels: int) -> None:
    if not MIN_SAMPLING_RATE <= rate <= MAX_SAMPLING_RATE:
        raise UnprocessableError(
            f"The audio has a sampling rate of {rate} Hz; send one from {MIN_SAMPLING_RATE} to"
            f" {MAX_SAMPLING_RATE} Hz.",
            code="audio_rate_out_of_range",
        )
    if not 1 <= num_channels <= MAX_CHANNELS:
        raise UnprocessableError(
            f"The audio has {num_channels} channels; send at most {MAX_CHANNELS}.",
            code="audio_too_many_channels",
        )


def check_size(seconds: float, num_values: int, max_audio_seconds: float) -> None:
    """Limits on what is decoded so far: its duration, and the samples of all its channels."""
    if seconds > max_audio_seconds:
        raise UnprocessableError(
            f"The audio is longer than the {max_audio_seconds:g} seconds that are allowed;"
            " send a shorter file.",
            code="audio_too_long",
        )
    if num_values > max_audio_seconds * MAX_VALUES_PER_SECOND:
        raise UnprocessableError(
            "The audio is too long for its channels and sampling rate; send it in stereo at"
            " 48 kHz or less.",
            code="audio_too_complex",
        )


def join_frames(frames: Iterator[AudioFrame]) -> Iterator[AudioFrame]:
    """Interleaved float frames ("flt") of about a second, or less of many channels, and one shape.

    Codecs make frames of some 20 ms, and NumPy's overhead on each would cost more than decoding.
    FFmpeg interleaves, since PyAV (18.1) reads past the end of the list of planes where each of
    eight channels or more has a plane of its own.
    """
    fifo, interleaver = AudioFifo(), AudioResampler(format="flt")
    shape = ("", 0, 0)
    for frame in frames:
        frame_shape = (frame.format.name, frame.sample_rate, frame.layout.nb_channels)
        if frame_shape != shape:  # the queue itself would not notice another channel count
            check_shape(frame.sample_rate, frame.layout.nb_channels)
            yield from drain(fifo, interleaver)
            fifo, interleaver = AudioFifo(), AudioResampler(format="flt")
            shape = frame_shape
        frame.pts = None  # a gap between time stamps is no error here
        fifo.write(frame)
        if fifo.samples >= min(frame.sample_rate, _BLOCK_VALUES // frame.layout.nb_channels):
            yield from drain(fifo, interleaver)
    yield from drain(fifo, interleaver)


def drain(fifo: AudioFifo, interleaver: AudioResampler) -> Iterator[AudioFrame]:
    for block in fifo.read_many(0):
        yield from interleaver.resample(block)


def finite_channels(frame: AudioFrame) -> npt.NDArray[np.float32]:
    """An interleaved frame's samples in bounds, float32 of shape (num_samples, num_channels)."""
    interleaved = cast(npt.NDArray[np.float32], frame.to_ndarray())
    channels = interleaved.reshape(-1, frame.layout.nb_channels)
    if within_bounds(channels):
        return channels
    finite = np.where(np.isfinite(channels), channels, np.float32(0))
    return finite.clip(-MAX_AMPLITUDE, MAX_AMPLITUDE)


def to_mono(channels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The mean of channels of shape (num_samples, num_channels)."""
    return cast(npt.NDArray[np.float32], reduce(np.add, channels.T) / np.float32(channels.shape[1]))


def within_bounds(samples: npt.NDArray[np.float32]) -> bool:
    """Whether all samples are numbers of at most MAX_AMPLITUDE; the least of some NaN is NaN."""
    return not samples.size or bool(
        samples.min() >= -MAX_AMPLITUDE and samples.max() <= MAX_AMPLITUDE
    )


def raise_if_memory(error: Exception) -> None:
    if isinstance(error, MemoryError):
        raise error


def restrict(max_audio_seconds: float, memory_limit_bytes: int) -> None:
    """Lower this process's limits for good: memory beyond what it has now, files, their size."""
    address_space = process_bytes() + memory_limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A minute more than the limit, which is checked between two frames.
    num_bytes = int((max_audio_seconds + 60) * SAMPLING_RATE * 4)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def process_bytes() -> int:
    """The address space in use, from proc(5) statm."""
    with open("/proc/self/statm") as statm:  # noqa: PTH123 - one word of a pseudo-file
        return int(statm.read().split()[0]) * resource.getpagesize()


def allow_cpu_seconds(seconds: int) -> None:
    """Let this process use so much more processor time; past it, the kernel ends it."""
    limit = math.ceil(time.process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


@contextlib.contextmanager
def cpu_limit(seconds: int) -> Iterator[None]:
    """A shorter `allow_cpu_seconds` for a while."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    allow_cpu_seconds(seconds)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)


def end_with_the_server() -> None:
    """Leave the end to the server: its death, or its closing the socket.

    A Ctrl-C or a SIGTERM for the whole group must not fail the songs of requests in flight.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def answer(
    encoded_fd: int, samples_fd: int, max_audio_seconds: float, measure_loudness: bool
) -> dict[str, Any]:
    try:
        return decode(encoded_fd, samples_fd, max_audio_seconds, measure_loudness)
    except AdapterError as error:
        return {"error": type(error).__name__, "code": error.code, "message": error.message}
    except MemoryError:
        return {
            "error": "UnprocessableError",
            "code": "audio_too_complex",
            "message": "Decoding the audio takes more memory than is allowed; send it in a simpler"
            " format, such as 16-bit WAV or MP3, without pictures.",
        }
    except (av.error.FFmpegError, ValueError):
        return {
            "error": "NotAudioError",
            "code": NotAudioError.code,
            "message": "The audio has a form that cannot be decoded; send WAV, FLAC or MP3.",
        }


def main(arguments: list[str]) -> None:
    control = socket.socket(fileno=int(arguments[0]))
    max_audio_seconds = float(arguments[1])
    end_with_the_server()
    av.logging.set_level(None)  # what FFmpeg says quotes the file
    restrict(max_audio_seconds, int(arguments[2]))
    control.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 16, 2)
        if not message:
            return
        allow_cpu_seconds(int(arguments[3]))
        try:
            said = answer(fds[0], fds[1], max_audio_seconds, message == b"measure")
            control.send(json.dumps(said).encode())
        finally:
            for fd in fds:
                os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1:])
