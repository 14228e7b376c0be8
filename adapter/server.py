"""uvicorn under `python -m adapter serve`: the first signal drains, the second cuts, the third
kills."""

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from adapter.api import create_app
from adapter.connections import Connection, allow_many_connections
from adapter.errors import SettingsError
from adapter.gate import Gate
from adapter.processes import kill_descendants
from adapter.service import Started
from adapter.settings import Settings
from adapter.supervisor import Supervisor, start_serving

logger = logging.getLogger(__name__)

END_SECONDS = 30  # for the engine to end after the last answer
CUT_SECONDS = 3  # for the same after a second signal: vLLM alone would take its processes 5
START_SECONDS = 2  # for an engine that is still starting, which may not listen


def serve(
    settings: Settings,
    *,
    host: str,
    port: int,
    root_path: str = "",
    start: Callable[[Settings], Started] = start_serving,
) -> int:
    """Serve until a signal.

    Returns the exit code: 0 after a drain, 1 where the engine failed, 128 and the signal's number
    where a second one cut requests off.
    """
    allow_many_connections()
    listening = _bind(host, port)  # a taken port must not cost the start of an engine
    app = create_app(settings, start=start)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        root_path=root_path,
        log_config=None,
        # Our own line says more than uvicorn's, which shows query strings.
        access_log=False,
        http=Connection,
        ws="none",
    )
    server = Server(config, app.state.gate, app.state.supervisor, settings.drain_seconds)
    logger.info("listening on http://%s:%d", *listening.getsockname()[:2])
    server.run(sockets=[listening])
    _exit_in(START_SECONDS, server.exit_code)  # whatever thread Python still waits for
    return server.exit_code


def _bind(host: str, port: int) -> socket.socket:
    """Raises SettingsError where the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or error
        raise SettingsError(f"--host {host} --port {port}: cannot listen there: {reason}") from None


class Server(uvicorn.Server):
    """Stays open while it drains, so that newcomers are told; uvicorn's own closes its socket.

    Nothing is left to uvicorn's signal handling, which raises the signal anew at the end.
    """

    def __init__(
        self, config: uvicorn.Config, gate: Gate, supervisor: Supervisor, drain_seconds: float
    ) -> None:
        super().__init__(config)
        self._gate = gate
        self._supervisor = supervisor
        self._drain_seconds = drain_seconds
        self._drained_at = 0.0  # monotonic: when those inside must be done
        self._signals: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        supervisor.on_failure = self._fail

    @property
    def exit_code(self) -> int:
        if len(self._signals) > 1:
            return 128 + self._signals[1]
        return 1 if self._supervisor.failure else 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Runs between any two lines of the main thread, so it only passes the word on."""
        self._signals.append(sig)
        if len(self._signals) > 2:
            _exit_now(self.exit_code)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._drain if len(self._signals) == 1 else self._cut)

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        if not self._gate.draining:
            return False
        return self._gate.num_inside == 0 or time.monotonic() >= self._drained_at

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        left_seconds = max(1.0, self._drained_at - time.monotonic())
        if self._gate.draining and self._gate.num_inside:
            logger.warning("cutting %d requests off", self._gate.num_inside)
            self._gate.cut()
            left_seconds = CUT_SECONDS
        # What is left now are answers on their way, to clients that may not read them.
        self.config.timeout_graceful_shutdown = round(left_seconds)
        if self._supervisor.status() in ("starting", "restarting"):
            _exit_in(START_SECONDS, self.exit_code)
        else:
            _exit_in(left_seconds + END_SECONDS, self.exit_code or 1)
        await super().shutdown(sockets)

    def _fail(self) -> None:
        self._gate.drain()
        self._drained_at = time.monotonic() + CUT_SECONDS

    def _drain(self) -> None:
        logger.info(
            "draining: %d requests have %g seconds to finish; a second signal cuts them off",
            self._gate.num_inside,
            self._drain_seconds,
        )
        self._gate.drain()
        self._drained_at = time.monotonic() + self._drain_seconds

    def _cut(self) -> None:
        logger.warning("a second signal: %d requests are cut off", self._gate.num_inside)
        self._gate.cut()
        self._drained_at = 0.0
        _exit_in(CUT_SECONDS, self.exit_code)


def _exit_in(seconds: float, exit_code: int) -> None:
    """End the process then, should it still be there: a thread cannot be interrupted while it
    starts an engine, and Python waits for threads."""
    timer = threading.Timer(seconds, _exit_now, [exit_code])
    timer.daemon = True
    timer.start()


def _exit_now(exit_code: int) -> None:
    kill_descendants()
    sys.stderr.flush()
    os._exit(exit_code)
