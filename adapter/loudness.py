"""The loudness of a song while it is decoded: FFmpeg's `ebur128` filter, fed block by block."""

import re
from fractions import Fraction

import av.error
import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.filter import Graph

MIN_SAMPLING_RATE = 8_000  # Hz; the filter's weights reach past half of a lower one
MAX_CHANNELS = 8

# Where channels have no names: the layouts that FFmpeg takes for their numbers.
_LAYOUTS = ("mono", "stereo", "2.1", "4.0", "5.0", "5.1", "6.1", "7.1")
_UNNAMED = re.compile(r"\d+ channels")
_METADATA_KEY = "lavfi.r128.I"
_SILENCE_LUFS = -70.0  # the absolute gate: what the filter says where nothing passed it
_FULL_LUFS = 10.0  # the filter counts what is louder as this


class Loudness:
    """The integrated loudness of ITU-R BS.1770-4 and EBU R 128, in LUFS.

    Rate and channels are the file's own. A low-frequency channel does not count, and those at the
    sides and back count 1.41 times, if the file says which they are; else they are taken to be in
    FFmpeg's order for their number. A single channel is heard from one loudspeaker: 3 dB less than
    the same in stereo.
    """

    def __init__(self) -> None:
        self._graph: Graph | None = None
        self._shape: tuple[int, str] | None = None
        self._lufs = _SILENCE_LUFS

    def write(self, channels: npt.NDArray[np.float32], rate: int, layout: str) -> None:
        """Measure a block of shape (num_samples, num_channels), all of it finite."""
        layout = name_layout(layout, channels.shape[1])
        try:
            if self._shape is None:
                self._shape = (rate, layout)
                self._graph = make_graph(rate, layout)
            elif self._shape != (rate, layout):
                self._graph = None
            if self._graph:
                frame = AudioFrame.from_ndarray(channels.reshape(1, -1), "flt", layout)
                frame.sample_rate = rate
                self._push(self._graph, frame)
        except (av.error.FFmpegError, ValueError, MemoryError):
            self._graph = None  # the song is heard all the same

    def finish(self) -> float | None:
        """The loudness, to be asked for once.

        None where nothing is louder than the gate of -70 LUFS or lasts for its 0.4 seconds, where
        the filter's scale ends (10 LUFS), and where there is no telling: a rate below 8 kHz, more
        than eight channels or those of a sound field (ambisonic), a change of either in mid-file.
        """
        if self._graph is None:
            return None
        # Less than 0.1 seconds are left inside, which comes out unmeasured.
        return self._lufs if _SILENCE_LUFS < self._lufs < _FULL_LUFS else None

    def _push(self, graph: Graph, frame: AudioFrame) -> None:
        graph.push(frame)
        while True:
            try:
                measured = graph.pull()
            except av.error.BlockingIOError:
                return
            self._lufs = float(measured.metadata[_METADATA_KEY])


def make_graph(rate: int, layout: str) -> Graph | None:
    if rate < MIN_SAMPLING_RATE or not layout:
        return None
    graph = Graph()
    graph.threads = 1
    source = graph.add_abuffer(
        sample_rate=rate, format="flt", layout=layout, time_base=Fraction(1, rate)
    )
    graph.link_nodes(source, graph.add("ebur128", "metadata=1"), graph.add("abuffersink"))
    graph.configure()
    return graph


def name_layout(layout: str, num_channels: int) -> str:
    """FFmpeg's name of a layout that the filter can weigh, or nothing."""
    if num_channels > MAX_CHANNELS or "ambisonic" in layout:
        return ""
    return _LAYOUTS[num_channels - 1] if _UNNAMED.fullmatch(layout) else layout
