"""A real server: `python -m adapter serve` as a process of its own."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

START_SECONDS = 300

# An answer for it runs to its cap of tokens, whatever the checkpoint would rather say.
LONG_LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 2000, "maxItems": 2000}


@dataclass(frozen=True)
class Server:
    """A running server; `log` is the file that its output goes to."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def engine(self) -> str:
        return str(self.get("/health").json()["engine"])

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, body: object, timeout_seconds: float = 300) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout_seconds)


@contextmanager
def running_server(
    model: Path,
    log: Path,
    settings: Mapping[str, str],
    command: Sequence[str] = (sys.executable, "-m", "adapter", "serve"),
) -> Iterator[Server]:
    """Start a server on a free port, wait until it is ready, end it with SIGTERM."""
    port = str(free_port())
    environment = {
        **os.environ,
        "ADAPTER_MODEL": str(model),
        "ADAPTER_DTYPE": "float32",
        "ADAPTER_USAGE_DB": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        **settings,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", port], env=environment, stdout=output, stderr=output
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_until_ready(server)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            if server.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError("the server did not become ready:\n" + server.log.read_text()[-4000:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
