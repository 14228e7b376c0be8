"""Signals on the real vLLM engine, whose own processes hear Ctrl-C in a terminal too."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server import LONG_LIST, Server, free_port, wait_until_ready

pytestmark = [pytest.mark.soak, pytest.mark.vllm]

PROMPTS = [
    {"prompt": f"Part {i}?", "max_new_tokens": 400, "json_schema": LONG_LIST} for i in range(32)
]
BATCH = {"prompts": PROMPTS, "group_size": 2}  # for some seconds on any machine


@pytest.fixture
def starting(random_model: Path, tmp_path: Path) -> Iterator[Server]:
    """A server on vLLM that has just been started, in a process group of its own."""
    port = str(free_port())
    environment = {
        "ADAPTER_MODEL": str(random_model),
        "ADAPTER_ENGINE": "vllm",
        "ADAPTER_DTYPE": "float32",
        "ADAPTER_USAGE_DB": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "adapter", "serve", "--port", port],
            env=os.environ | environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    yield Server(f"http://127.0.0.1:{port}", process, log)
    process.kill()
    process.wait()


class Asking(threading.Thread):
    """A batch on its way; `response` is None where the connection broke."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self.response: httpx.Response | None = None
        self.start()
        deadline = time.monotonic() + 60
        while "adapter_num_requests_running 2.0" not in server.get("/metrics").text:
            assert time.monotonic() < deadline, server.log.read_text()[-4000:]
            time.sleep(0.05)

    def run(self) -> None:
        self.response = self._server.post("/generate_batch", BATCH)


def descendants(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def exit_code(server: Server, processes: list[psutil.Process], within_seconds: float) -> int:
    """The server's, once it and the given processes are gone."""
    began = time.monotonic()
    code = server.process.wait(timeout=within_seconds)
    print(f"{len(processes)} processes and the server: {time.monotonic() - began:.1f} s to the end")
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    return code


def test_ctrl_c_lets_a_batch_finish(starting: Server) -> None:
    wait_until_ready(starting)
    processes = descendants(starting)
    assert any("EngineCore" in process.name() for process in processes)
    asking = Asking(starting)
    assert "vllm:num_requests_running" in starting.get("/metrics").text
    os.killpg(starting.process.pid, signal.SIGINT)
    time.sleep(0.3)
    newcomer = starting.post("/generate", {})
    asking.join()
    assert (newcomer.status_code, newcomer.json()["error"]["code"]) == (503, "draining")
    assert asking.response is not None and asking.response.status_code == 200
    answers = asking.response.json()["answers"]
    assert [answer["finish_reason"] is not None for answer in answers] == [True] * 32
    assert exit_code(starting, processes, 40) == 0


def test_a_second_sigterm_cuts_a_batch_and_ends_the_engine(starting: Server) -> None:
    wait_until_ready(starting)
    processes = descendants(starting)
    asking = Asking(starting)
    for _ in range(2):
        starting.process.terminate()
        time.sleep(0.2)
    assert exit_code(starting, processes, 10) == 128 + signal.SIGTERM
    asking.join()
    assert asking.response is not None and asking.response.status_code == 503


def test_sigterm_while_the_engine_starts_ends_it_at_once(starting: Server) -> None:
    deadline = time.monotonic() + 120
    while not any("EngineCore" in process.name() for process in descendants(starting)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(3)  # it loads the weights
    processes = descendants(starting)
    starting.process.terminate()
    assert exit_code(starting, processes, 15) == 0  # where the start would take a minute
