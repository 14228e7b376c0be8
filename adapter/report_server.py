"""The server that answers a run of `report`: a given one, or one that is started for it."""

import ctypes
import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from adapter.errors import SettingsError
from adapter.settings import CLIENT_KEY, variable_name

HOST = "127.0.0.1"
# After each of three signals: to drain and end the engine, to cut, to kill what it started.
END_SECONDS = (30.0, 10.0, 5.0)

_PR_SET_PDEATHSIG = 1  # prctl(2)
# Of the keys of others: the server has this run for its only client.
_KEY_SETTINGS = ("metrics_keys", "key_max_prompts", "key_max_seconds_per_day")


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask. `check` raises SettingsError where a server that was started has ended."""

    url: str
    key: str | None
    check: Callable[[], None] = lambda: None


@contextmanager
def started_server(note: Callable[[str], None]) -> Iterator[Server]:
    """`python -m adapter serve` on a free port, with the settings of the environment; ended with
    the block, and with this process however that ends.

    Yields once it is healthy, which may take a download of the model. Its log is kept where it ends
    by itself: then SettingsError, which names the log, is raised here and by the server's `check`.
    """
    key = secrets.token_urlsafe(24)
    port = _free_port()
    descriptor, name = tempfile.mkstemp(prefix="adapter-report-", suffix=".log")
    log = Path(name)
    with os.fdopen(descriptor, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "adapter", "serve", "--host", HOST, "--port", str(port)],
            env=_environment(os.environ, key),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is ours alone: songs are given up before the server
            preexec_fn=_end_with_parent,
        )
    try:
        note(f"starting a server; its log is {log}")
        _wait_until_healthy(process, port, log)
        yield Server(f"http://{HOST}:{port}", key, lambda: _check(process, log))
    finally:
        ended_by_itself = process.poll() is not None
        _end(process)
        if not ended_by_itself:
            log.unlink()


def _environment(environ: Mapping[str, str], key: str) -> dict[str, str]:
    """The settings as they are, but for the keys: the port is open to all users of the machine."""
    dropped = {CLIENT_KEY, *map(variable_name, _KEY_SETTINGS)}
    kept = {name: value for name, value in environ.items() if name not in dropped}
    return {**kept, variable_name("api_keys"): f"report:{key}"}


def _end_with_parent() -> None:
    """Have Linux send this process SIGTERM when its parent is gone, be it by SIGKILL."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


_LIBC = ctypes.CDLL(None)


def _wait_until_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    while not _healthy(port):
        _check(process, log)
        time.sleep(0.2)


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _check(process: "subprocess.Popen[bytes]", log: Path) -> None:
    status = process.poll()
    if status is None:
        return
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it is empty")
    raise SettingsError(f"the server ended with status {status}; its log is {log}: {last.strip()}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Each Ctrl-C meanwhile goes on to the next, harder signal."""
    for seconds in END_SECONDS:
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.terminate()
            process.wait(timeout=seconds)
        if process.returncode is not None:
            return
    process.kill()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
