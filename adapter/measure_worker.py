"""One process that measures the tempo and the key of one song after the other.

Run by adapter/measure.py as `python -m adapter.measure_worker FD MEMORY_BYTES CPU_SECONDS`, where
FD is one end of a socket pair. A message on it brings the descriptor of a file of float32 samples,
mono at 16 kHz; the answer is a line of JSON, {"tempo_bpm", "key", "mode", "key_strength"}, each
null where there is none.
"""

import json
import math
import mmap
import os
import resource
import socket
import sys
from collections.abc import Iterator
from typing import Any, cast

import librosa
import numpy as np
import numpy.typing as npt

from adapter.decoder_worker import allow_cpu_seconds, end_with_the_server, process_bytes
from adapter.request import SAMPLING_RATE

Floats = npt.NDArray[np.floating[Any]]

NICENESS = 10

# Songs are measured piece by piece, so that what an hour takes is time and not memory.
_PIECE_SAMPLES = 60 * SAMPLING_RATE
_SILENT_AMPLITUDE = 1e-4  # -80 dB of full scale

MIN_TEMPO_SECONDS = 4.0
MIN_TEMPO_BPM, MAX_TEMPO_BPM = 40.0, 240.0
MIN_ONSETS_DB = 0.2
MIN_PULSE = 0.15  # the least autocorrelation that is a beat: noise has none beyond 0.1
_ONSET_HOP = 128  # 8 ms; a parabola finds the beat between two of them
_ONSET_FFT = 1024
_MAX_BEATS = 8  # so many beats later the onsets are compared once more, for precision
_USUAL_BPM = 120.0

KEYS = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")
MIN_CHROMA_SPREAD = 0.2  # standard deviation over mean; noise has up to 0.15, music 0.3 and more
CLEAR_MARGIN = 0.1  # of correlation: as far as that from the next key, an estimate is clear
_CHROMA_FFT = 8192  # half a second: two bins for a semitone at 65 Hz
_CHROMA_HOP = 4096
_BAND_BINS = 64  # 125 Hz: what is as loud all over a band is a drum's or the air's

# How well each pitch class, from the key's own, fits a key, as listeners judged: the profiles of
# Krumhansl and Kessler, 1982, as in Krumhansl, Cognitive Foundations of Musical Pitch, 1990, p. 30.
_PROFILES = {
    "major": (6.35, 2.23, 3.48, 2.33, 4.38, 4.09, 2.52, 5.19, 2.39, 3.66, 2.29, 2.88),
    "minor": (6.33, 2.68, 3.52, 5.38, 2.60, 3.53, 2.54, 4.75, 3.98, 2.69, 3.34, 3.17),
}


def measure(samples: Floats) -> dict[str, Any]:
    """What is measured of samples of shape (num_samples,) at 16 kHz."""
    key, mode, strength = estimate_key(samples) or (None, None, None)
    return {
        "tempo_bpm": estimate_tempo(samples),
        "key": key,
        "mode": mode,
        "key_strength": strength,
    }


def pieces(samples: Floats, min_samples: int) -> Iterator[Floats]:
    """Pieces of a minute that are long enough and not silent."""
    for start in range(0, len(samples), _PIECE_SAMPLES):
        piece = samples[start : start + _PIECE_SAMPLES]
        if len(piece) >= min_samples and np.abs(piece).max() > _SILENT_AMPLITUDE:
            yield piece


def estimate_tempo(samples: Floats) -> float | None:
    """Beats per minute, or None without a pulse.

    The lag at which the onsets' strength resembles itself most, near 120 BPM preferred (an octave
    away counts 0.6 times; D. Ellis, "Beat Tracking by Dynamic Programming", 2007); half and double
    of what a listener taps are common.
    """
    frames_per_minute = 60 * SAMPLING_RATE / _ONSET_HOP
    max_lag = math.ceil(_MAX_BEATS * frames_per_minute / MIN_TEMPO_BPM)
    similarity = compare_onsets(samples, max_lag)
    if similarity is None:
        return None
    lags = np.arange(
        math.floor(frames_per_minute / MAX_TEMPO_BPM),
        min(math.ceil(frames_per_minute / MIN_TEMPO_BPM), len(similarity) - 2) + 1,
    )
    octaves = np.log2(frames_per_minute / lags / _USUAL_BPM)
    lag = int(lags[np.argmax(similarity[lags] * np.exp(-0.5 * octaves**2))])
    if similarity[lag] < MIN_PULSE:
        return None
    return float(frames_per_minute / refine(similarity, lag))


def compare_onsets(samples: Floats, max_lag: int) -> Floats | None:
    """The autocorrelation of the onsets' strength by lag in hops, 1 at lag 0; None without onsets.

    Each lag is averaged over as many products as it has.
    """
    products, counts = np.zeros(max_lag), np.zeros(max_lag)
    variance, num_frames = 0.0, 0
    for piece in pieces(samples, round(MIN_TEMPO_SECONDS * SAMPLING_RATE)):
        onsets = librosa.onset.onset_strength(
            y=piece, sr=SAMPLING_RATE, hop_length=_ONSET_HOP, n_fft=_ONSET_FFT
        )[_ONSET_FFT // _ONSET_HOP : -_ONSET_FFT // _ONSET_HOP]  # the cuts are no onsets
        onsets = onsets - onsets.mean()
        size = min(max_lag, len(onsets) // 2)  # beyond, too few products
        products[:size] += librosa.autocorrelate(onsets, max_size=size)
        counts[:size] += len(onsets) - np.arange(size)
        variance += float(np.square(onsets).sum())
        num_frames += len(onsets)
    if not num_frames or math.sqrt(variance / num_frames) < MIN_ONSETS_DB:
        return None
    known = counts > 0
    return cast(Floats, products[known] / counts[known] / (variance / num_frames))


def refine(similarity: Floats, lag: int) -> float:
    """The beat's lag between two hops, from the peaks one, two, four and eight beats later."""
    beat = peak_near(similarity, lag, 2)
    num_beats = 2
    while num_beats <= _MAX_BEATS and round(num_beats * beat) + 4 < len(similarity):
        later = peak_near(similarity, round(num_beats * beat), 3) / num_beats
        if similarity[round(later * num_beats)] < MIN_PULSE:
            break
        beat = later
        num_beats *= 2
    return beat


def peak_near(similarity: Floats, lag: int, width: int) -> float:
    """The vertex of the parabola through the greatest value within `width` and its neighbours."""
    lag += int(np.argmax(similarity[lag - width : lag + width + 1])) - width
    before, peak, after = similarity[lag - 1 : lag + 2]
    bend = before - 2 * peak + after
    return float(lag + 0.5 * (before - after) / bend) if bend < 0 else float(lag)


def estimate_key(samples: Floats) -> tuple[str, str, float] | None:
    """Key, mode and strength, or None where no pitch class stands out.

    The strength is the correlation of the song's pitch classes with the key's profile, from 0 to 1,
    lowered in proportion where the next best key is nearer than `CLEAR_MARGIN`.
    """
    chroma = sum_chroma(samples)
    if chroma is None or chroma.std() < MIN_CHROMA_SPREAD * chroma.mean():
        return None
    fits = sorted(
        (float(np.corrcoef(chroma, np.roll(profile, key))[0, 1]), KEYS[key], mode)
        for mode, profile in _PROFILES.items()
        for key in range(12)
    )
    (second, _, _), (best, key_name, mode) = fits[-2:]
    strength = max(0.0, best) * min(1.0, (best - second) / CLEAR_MARGIN)
    return key_name, mode, strength


def sum_chroma(samples: Floats) -> Floats | None:
    """The share of each pitch class from C, shape (12,), or None in silence."""
    total = np.zeros(12)
    for piece in pieces(samples, _CHROMA_FFT):
        spectrum = np.abs(librosa.stft(piece, n_fft=_CHROMA_FFT, hop_length=_CHROMA_HOP))
        total += librosa.feature.chroma_stft(
            S=keep_tones(spectrum), sr=SAMPLING_RATE, n_fft=_CHROMA_FFT, norm=None
        ).sum(axis=1)
    return total / total.sum() if total.sum() > 0 else None


def keep_tones(spectrum: Floats) -> Floats:
    """Magnitudes of shape (num_bins, num_frames) less twice the median of their band."""
    num_bins, num_frames = spectrum.shape
    bands = spectrum[: num_bins // _BAND_BINS * _BAND_BINS].reshape(-1, _BAND_BINS, num_frames)
    floor = np.repeat(2 * np.median(bands, axis=1), _BAND_BINS, axis=0)
    tones = np.zeros_like(spectrum)
    tones[: len(floor)] = np.maximum(0, spectrum[: len(floor)] - floor)
    return tones


def read_samples(fd: int) -> npt.NDArray[np.float32]:
    if not os.fstat(fd).st_size:
        return np.zeros(0, np.float32)
    return np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), dtype=np.float32)


def load_libraries() -> None:
    """Measure noise: librosa loads its parts at their first use, and Numba may compile some."""
    measure(np.random.default_rng(0).normal(0, 0.1, 5 * SAMPLING_RATE).astype(np.float32))


def restrict(memory_limit_bytes: int) -> None:
    """Lower this process's limits for good: memory beyond what it has now."""
    address_space = process_bytes() + memory_limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(arguments: list[str]) -> None:
    control_fd, memory_limit_bytes, cpu_seconds = map(int, arguments)
    control = socket.socket(fileno=control_fd)
    end_with_the_server()
    os.nice(NICENESS)
    load_libraries()
    restrict(memory_limit_bytes)
    control.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 16, 1)
        if not message:
            return
        allow_cpu_seconds(cpu_seconds)
        try:
            # The samples are unmapped as `measure` returns: nothing else refers to them.
            control.send(json.dumps(measure(read_samples(fds[0]))).encode())
        finally:
            for fd in fds:
                os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1:])
