"""`python -m tests.fake_server --port N`: the real server on an engine that starts at once.

The engine has a process of its own, as vLLM's has, which would end at SIGINT. Its start takes
FAKE_START_SECONDS, and a request's head may take FAKE_HEAD_SECONDS, a client's
silence FAKE_READ_SECONDS.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess

from adapter import connections, logs
from adapter.checkpoint import load_checkpoint
from adapter.server import serve
from adapter.service import Started
from adapter.settings import Settings, load_settings
from tests.fakes import FakeEngine


class EngineWithProcess(FakeEngine):
    """Says that it is alive while its process is."""

    def __init__(self, process: BaseProcess) -> None:
        super().__init__(continuous=True, step_seconds=0.05)
        self._process = process

    async def shutdown(self) -> None:
        print("the engine was alive to the end:", self._process.is_alive(), flush=True)
        self._process.terminate()
        self._process.join()


def engine_process() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    time.sleep(600)


def start(settings: Settings) -> Started:
    process = multiprocessing.get_context("spawn").Process(target=engine_process)
    process.start()
    time.sleep(float(os.environ.get("FAKE_START_SECONDS", "0")))
    return Started(load_checkpoint(settings.model), EngineWithProcess(process), "a test")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--root-path", default="")
    args = parser.parse_args()
    connections.HEAD_SECONDS = float(os.environ.get("FAKE_HEAD_SECONDS", "20"))
    connections.READ_SECONDS = float(os.environ.get("FAKE_READ_SECONDS", "30"))
    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)
    sys.exit(
        serve(settings, host="127.0.0.1", port=args.port, root_path=args.root_path, start=start)
    )
