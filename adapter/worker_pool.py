"""Worker processes that stay: each answers one message at a time, and one that fails is replaced.

A message goes over a socket pair with the descriptors of the files that it is about, and what comes
back is JSON. A worker says `ready` when it can be asked, and ends where its socket does.
"""

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from adapter.errors import UnavailableError

_MESSAGE_BYTES = 1 << 16


class WorkerTooSlowError(Exception):
    """A worker took more time than it has for an answer; the text says of which clock."""


class WorkerCrashedError(Exception):
    """A worker ended instead of answering; the text says how."""


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """A process and the server's side of its socket pair."""

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


class WorkerPool:
    """A fixed number of worker processes, each with one message at a time.

    A worker that crashes, takes longer than `timeout_seconds` or whose caller leaves is killed, and
    a new one started in its seat. Seats are empty until `start` or, without it, the first message.

    `python -m` runs `module` with the number of the worker's socket, the `limits`, and the seconds
    of processor time that it is to allow itself for a message. `environment` is all that it gets.
    `name` begins the messages of errors ("An audio decoder"). `start_seconds` are for its imports,
    on a busy machine.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        name: str,
        module: str,
        limits: Sequence[float],
        environment: Mapping[str, str],
        timeout_seconds: float,
        start_seconds: float = 60.0,
    ) -> None:
        self.num_workers = num_workers
        self._name = name
        self._program = (sys.executable, "-m", module)
        # The server's clock ends a slow worker; the kernel's ends one that lost its server.
        cpu_seconds = math.ceil(timeout_seconds) + 5
        self._limits = (*map(str, limits), str(cpu_seconds))
        self._environment = dict(environment)
        self._timeout_seconds = timeout_seconds
        self._start_seconds = start_seconds
        self._seats: asyncio.Queue[asyncio.Task[Worker] | None] = asyncio.Queue()
        for _ in range(num_workers):
            self._seats.put_nowait(None)
        self._starting: set[asyncio.Task[Worker]] = set()
        self._workers: set[Worker] = set()
        self._closed = False

    async def start(self) -> None:
        """Start the workers. Raises UnavailableError where they do not come up."""
        self._renew_free_seats()
        try:
            await asyncio.gather(*self._starting)
        except BaseException:
            await self.close()
            raise

    async def ask(self, message: bytes, fds: Sequence[int]) -> dict[str, Any]:
        """A worker's answer to a message about the files behind `fds`.

        Raises WorkerTooSlowError, WorkerCrashedError, and UnavailableError where no worker can be
        had.
        """
        async with self._lend_worker() as worker:
            return await self._exchange(worker, message, fds)

    async def close(self) -> None:
        """End all workers; who waits for an answer gets UnavailableError. May be called twice."""
        self._closed = True
        workers = list(self._workers)
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.process.wait() for worker in workers))
        # Whoever waits for a seat finds one that says so.
        self._renew_free_seats()
        if self._starting:
            await asyncio.wait(self._starting)

    @contextlib.asynccontextmanager
    async def _lend_worker(self) -> AsyncIterator[Worker]:
        """Lend a worker; where anything goes wrong with it, a new one takes its seat."""
        seat = await self._seats.get()
        try:
            if seat is None or not self._usable(seat):
                seat = self._renew(seat)
            yield await asyncio.shield(seat)
        except BaseException:
            if seat and seat.done():
                seat = self._renew(seat)
            raise
        finally:
            self._seats.put_nowait(seat)

    def _usable(self, seat: asyncio.Task[Worker]) -> bool:
        """False where a worker died at rest, or never started: no fault of the next message's."""
        if not seat.done():
            return True
        return not seat.cancelled() and not seat.exception() and seat.result().idle

    def _renew_free_seats(self) -> None:
        for _ in range(self._seats.qsize()):
            self._seats.put_nowait(self._renew(self._seats.get_nowait()))

    def _renew(self, seat: asyncio.Task[Worker] | None) -> asyncio.Task[Worker]:
        """Dismiss whoever has the seat, and start a worker for it."""
        if seat and seat.done() and not seat.cancelled() and not seat.exception():
            self._discard(seat.result())
        new_seat = asyncio.create_task(self._start_worker())
        self._starting.add(new_seat)
        new_seat.add_done_callback(self._starting.discard)
        # Marks the error as seen; whoever sits down next meets it.
        new_seat.add_done_callback(lambda seat: seat.cancelled() or seat.exception())
        return new_seat

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
            await self._await_ready(worker)
        except BaseException:
            self._discard(worker)
            await process.wait()
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
                env=self._environment,
            )
        except OSError as error:
            raise UnavailableError(f"{self._name} could not be started; try again.") from error

    async def _await_ready(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self._start_seconds):
                ready = await receive(worker.control)
        except TimeoutError:
            raise UnavailableError(f"{self._name} did not start in time; try again.") from None
        if not ready:
            raise UnavailableError(f"{self._name} ended as it started; see the server's log.")

    async def _exchange(self, worker: Worker, message: bytes, fds: Sequence[int]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # it died just now, and has no answer below
            socket.send_fds(worker.control, [message], fds)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                answer = await receive(worker.control)
        except TimeoutError:
            raise WorkerTooSlowError(f"was ended after {self._timeout_seconds:g} seconds") from None
        if answer:
            return cast(dict[str, Any], json.loads(answer))
        self._refuse_if_closed()
        status = await exit_status(worker)
        if status == -signal.SIGXCPU:
            raise WorkerTooSlowError("used up its processor time")
        raise WorkerCrashedError(f"ended with status {status}")


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
