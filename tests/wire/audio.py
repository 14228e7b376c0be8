"""Songs as the wire takes them."""

import base64

import numpy as np
import numpy.typing as npt

from tests.songs import encode, melody


def song(seconds: float, seed: int = 0) -> npt.NDArray[np.float32]:
    """A made song, mono at 16 kHz: float32 samples of shape (num_samples,)."""
    return melody(seconds, 16_000, 1, seed)[0].astype(np.float32)


def as_base64(samples: npt.NDArray[np.float32]) -> str:
    """The samples as a WAV file of floats: they are decoded to just these values."""
    return base64.b64encode(encode(samples[None], "wav-float", rate=16_000)).decode()


def silence(seconds: float) -> str:
    """Silence as base64 of a FLAC file: long songs in a small body."""
    quiet = np.zeros((1, round(seconds * 16_000)), np.float32)
    return base64.b64encode(encode(quiet, "flac", rate=16_000)).decode()
