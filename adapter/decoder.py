"""Decodes songs in worker processes: a file that crashes a decoder fails its own request only.

The server hands a worker two descriptors over a socket pair, one of the encoded bytes and one of an
empty memory file, and maps what the worker wrote there. So no song is copied between processes, and
nothing is left on disk however either of them ends.
"""

import asyncio
import fcntl
import hashlib
import logging
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from adapter.errors import NotAudioError, UnprocessableError
from adapter.worker_pool import (
    Worker,
    WorkerCrashedError,
    WorkerPool,
    WorkerTooSlowError,
    worker_environment,
)

logger = logging.getLogger(__name__)

_SONG_ERRORS = {error.__name__: error for error in (NotAudioError, UnprocessableError)}


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSong:
    """An audio file as it came: `file` has a descriptor, `digest` is the hex SHA-256 of it."""

    file: BinaryIO
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, eq=False)
class Song:
    """A decoded song.

    `samples` is a read-only float32 array of shape (num_samples,), mono at 16 kHz.
    `duration_seconds` is the song's own length, whatever is cut later. `digest` is the hex SHA-256
    of the samples: equal samples, equal digest. `decode_seconds` leaves out the wait for a worker.
    `loudness_lufs` is the integrated loudness of the file's own channels (loudness.py), where it
    was asked for and can be told.
    """

    samples: npt.NDArray[np.float32]
    duration_seconds: float
    digest: str
    decode_seconds: float
    loudness_lufs: float | None = None


class DecoderPool(WorkerPool):
    """A fixed number of decoder processes, each with one song at a time.

    A decoder that crashes, takes longer than `timeout_seconds` or whose client leaves is replaced.
    `memory_limit_bytes` is what one may allocate beside the samples. `worker_module` is what
    `python -m` runs; tests plant a hostile one.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        max_audio_seconds: float,
        memory_limit_bytes: int = 512 * 2**20,
        timeout_seconds: float = 120.0,
        worker_module: str = "adapter.decoder_worker",
    ) -> None:
        super().__init__(
            num_workers,
            name="An audio decoder",
            module=worker_module,
            limits=(max_audio_seconds, memory_limit_bytes),
            environment=worker_environment(),
            timeout_seconds=timeout_seconds,
        )
        self.max_audio_seconds = max_audio_seconds

    async def decode(self, file: BinaryIO, *, measure_loudness: bool = False) -> Song:
        """Decode an audio file to mono at 16 kHz; of `file` only the descriptor is used.

        The song's loudness is None unless it is to be measured.

        Raises NotAudioError for what is no audio or crashes a decoder, UnprocessableError for what
        passes a limit, UnavailableError where no worker can be had.
        """
        file.flush()
        task = b"measure" if measure_loudness else b"decode"
        with memory_file() as samples_file:
            async with self._lend_worker() as worker:
                started = time.perf_counter()
                answer = await self._exchange(worker, task, [file.fileno(), samples_file.fileno()])
            raise_song_error(answer)
            samples = map_samples(samples_file.fileno(), answer["num_samples"])
        digest = await asyncio.to_thread(hash_samples, samples)
        decode_seconds = time.perf_counter() - started
        return Song(
            samples, answer["duration_seconds"], digest, decode_seconds, answer["loudness_lufs"]
        )

    async def _exchange(self, worker: Worker, message: bytes, fds: Sequence[int]) -> dict[str, Any]:
        """As in every pool, but that a worker's failure is its file's."""
        try:
            return await super()._exchange(worker, message, fds)
        except WorkerTooSlowError as error:
            logger.warning("A decoder %s", error)
            raise takes_too_long() from None
        except WorkerCrashedError:
            logger.warning("A decoder crashed on a file")
            raise decoder_failed() from None


def memory_file() -> BinaryIO:
    return os.fdopen(os.memfd_create("samples", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "rb")


def map_samples(fd: int, num_samples: int) -> npt.NDArray[np.float32]:
    """Map a memory file of float32 samples, read-only.

    It is sealed first, so that nothing can change or shorten what the server maps.
    """
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    num_bytes = os.fstat(fd).st_size
    if num_bytes != num_samples * 4 or not num_bytes:
        raise decoder_failed()
    mapped = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    return np.frombuffer(mapped, dtype=np.float32)


def raise_song_error(answer: dict[str, Any]) -> None:
    if "error" in answer:
        raise _SONG_ERRORS[answer["error"]](answer["message"], code=answer["code"])


def takes_too_long() -> UnprocessableError:
    return UnprocessableError(
        "Decoding the audio takes longer than is allowed; send a shorter file, or one in a simpler"
        " format and without tags.",
        code="audio_too_complex",
    )


def decoder_failed() -> NotAudioError:
    return NotAudioError("The audio file cannot be decoded: a decoder failed on it.")


def hash_samples(samples: npt.NDArray[np.float32]) -> str:
    return hashlib.sha256(samples.data).hexdigest()
