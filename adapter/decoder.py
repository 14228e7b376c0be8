"""Decodes songs in worker processes: a file that crashes a decoder fails its own request only.

The server hands a worker two descriptors over a socket pair, one of the encoded bytes and one of an
empty memory file, and maps what the worker wrote there. So no song is copied between processes, and
nothing is left on disk however either of them ends.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import math
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from adapter.errors import NotAudioError, UnavailableError, UnprocessableError

logger = logging.getLogger(__name__)

_START_SECONDS = 60  # a worker imports NumPy and FFmpeg; a busy machine takes its time
_MESSAGE_BYTES = 1 << 16
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


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """A decoder process and the server's side of its socket pair."""

    process: asyncio.subprocess.Process
    control: socket.socket

    @property
    def idle(self) -> bool:
        """True where the process lives and has said nothing unasked; a dead one's socket ends."""
        try:
            self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def kill(self) -> None:
        """End the process, which asyncio then reaps."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class DecoderPool:
    """A fixed number of decoder processes, each with one song at a time.

    A worker that crashes, takes longer than `timeout_seconds` or whose client leaves is killed, and
    a new one started in its seat. `memory_limit_bytes` is what a worker may allocate beside the
    samples. `worker_module` is what `python -m` runs; tests plant a hostile one.
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
        self.max_audio_seconds = max_audio_seconds
        self.num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._program = (sys.executable, "-m", worker_module)
        # The server's clock ends a slow worker; the kernel's ends one that lost its server.
        cpu_seconds = math.ceil(timeout_seconds) + 5
        self._limits = (str(max_audio_seconds), str(memory_limit_bytes), str(cpu_seconds))
        self._seats: asyncio.Queue[asyncio.Task[Worker]] = asyncio.Queue()
        self._starting: set[asyncio.Task[Worker]] = set()
        self._workers: set[Worker] = set()
        self._closed = False

    async def start(self) -> None:
        """Start the workers. Raises UnavailableError where they do not come up."""
        seats = [self._new_seat() for _ in range(self.num_workers)]
        for seat in seats:
            self._seats.put_nowait(seat)
        try:
            await asyncio.gather(*seats)
        except BaseException:
            await self.close()
            raise

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
                answer = await self._exchange(worker, task, file.fileno(), samples_file.fileno())
            raise_song_error(answer)
            samples = map_samples(samples_file.fileno(), answer["num_samples"])
        digest = await asyncio.to_thread(hash_samples, samples)
        decode_seconds = time.perf_counter() - started
        return Song(
            samples, answer["duration_seconds"], digest, decode_seconds, answer["loudness_lufs"]
        )

    async def close(self) -> None:
        """End all workers; songs at work fail with UnavailableError. May be called twice."""
        self._closed = True
        workers = list(self._workers)
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.process.wait() for worker in workers))
        # Whoever waits for a seat finds one that says so.
        for _ in range(self._seats.qsize()):
            self._seats.put_nowait(self._replace(self._seats.get_nowait()))
        if self._starting:
            await asyncio.wait(self._starting)

    @contextlib.asynccontextmanager
    async def _lend_worker(self) -> AsyncIterator[Worker]:
        """Lend a worker; where anything goes wrong with it, a new one takes its seat."""
        seat = await self._seats.get()
        try:
            if not self._usable(seat):
                seat = self._replace(seat)
            yield await asyncio.shield(seat)
        except BaseException:
            if seat.done():
                seat = self._replace(seat)
            raise
        finally:
            self._seats.put_nowait(seat)

    def _usable(self, seat: asyncio.Task[Worker]) -> bool:
        """False where a worker died at rest, or never started: no fault of the next song's."""
        if not seat.done():
            return True
        return not seat.cancelled() and not seat.exception() and seat.result().idle

    def _new_seat(self) -> asyncio.Task[Worker]:
        seat = asyncio.create_task(self._start_worker())
        self._starting.add(seat)
        seat.add_done_callback(self._starting.discard)
        # Marks the error as seen; whoever sits down next meets it.
        seat.add_done_callback(lambda seat: seat.cancelled() or seat.exception())
        return seat

    def _replace(self, seat: asyncio.Task[Worker]) -> asyncio.Task[Worker]:
        self._dismiss(seat)
        return self._new_seat()

    def _dismiss(self, seat: asyncio.Task[Worker]) -> None:
        if seat.done() and not seat.cancelled() and not seat.exception():
            self._discard(seat.result())

    def _discard(self, worker: Worker) -> None:
        worker.kill()
        worker.control.close()
        self._workers.discard(worker)

    async def _start_worker(self) -> Worker:
        self._refuse_if_closed()
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        try:
            with theirs:
                process = await self._start_process(theirs.fileno())
        except BaseException:
            control.close()
            raise
        worker = Worker(process, control)
        self._workers.add(worker)
        try:
            self._refuse_if_closed()
            await await_ready(worker)
        except BaseException:
            self._discard(worker)
            raise
        return worker

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UnavailableError("The server is stopping; send the request again later.")

    async def _start_process(self, control_fd: int) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self._program,
                str(control_fd),
                *self._limits,
                pass_fds=[control_fd],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env=worker_environment(),
            )
        except OSError as error:
            raise UnavailableError("An audio decoder could not be started; try again.") from error

    async def _exchange(
        self, worker: Worker, task: bytes, encoded_fd: int, samples_fd: int
    ) -> dict[str, Any]:
        socket.send_fds(worker.control, [task], [encoded_fd, samples_fd])
        try:
            async with asyncio.timeout(self._timeout_seconds):
                answer = await receive(worker.control)
        except TimeoutError:
            logger.warning("A decoder was ended after %g seconds", self._timeout_seconds)
            raise takes_too_long() from None
        if answer:
            return cast(dict[str, Any], json.loads(answer))
        self._refuse_if_closed()
        if await exit_status(worker) == -signal.SIGXCPU:
            logger.warning("A decoder used up its processor time on a file")
            raise takes_too_long()
        logger.warning("A decoder crashed on a file")
        raise decoder_failed()


async def await_ready(worker: Worker) -> None:
    try:
        async with asyncio.timeout(_START_SECONDS):
            ready = await receive(worker.control)
    except TimeoutError:
        raise UnavailableError("An audio decoder did not start in time; try again.") from None
    if not ready:
        raise UnavailableError("An audio decoder ended as it started; see the server's log.")


async def receive(control: socket.socket) -> bytes:
    """The next message, or nothing where the other side is gone."""
    try:
        return await asyncio.get_running_loop().sock_recv(control, _MESSAGE_BYTES)
    except ConnectionResetError:
        return b""


async def exit_status(worker: Worker) -> int | None:
    """What a worker whose socket has ended came to; None where it still runs after a second."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(worker.process.wait(), 1)
    return None


def worker_environment() -> dict[str, str]:
    """What a worker gets of the environment: the way to the packages, and none of the secrets."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}


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
