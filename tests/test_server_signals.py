"""SIGTERM and Ctrl-C under `python -m adapter serve`: the first drains, the second cuts."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.server import LONG_LIST, Server, free_port, running_server, wait_until_ready

SECRET = "hunter2"
LISTS = [{"max_new_tokens": 500, "prompt": SECRET, "json_schema": LONG_LIST}] * 3
BATCH = {"prompts": LISTS, "group_size": 1}  # more than a second on any machine
LONG = {"max_new_tokens": 2000, "prompt": SECRET}  # 100 s on the fake engine
SHORT = {"max_new_tokens": 40, "prompt": SECRET}  # 2 s


class Asking(threading.Thread):
    """One request on its way; `response` is None where the connection broke."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        super().__init__()
        self._server, self._body = server, body
        self.response: httpx.Response | None = None
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        with suppress(httpx.TransportError):
            path = "/generate_batch" if "prompts" in self._body else "/generate"
            self.response = self._server.post(f"{path}?token={SECRET}", self._body)
        self.ended_at = time.monotonic()

    def result(self) -> tuple[int, str | None]:
        """The status, and the code of the error if there is one."""
        self.join()
        assert self.response is not None
        error = self.response.json().get("error")
        return self.response.status_code, error and error["code"]


@contextmanager
def fake_server(
    model: Path, log: Path, *arguments: str, wait: bool = True, **settings: str
) -> Iterator[Server]:
    """A server on the fake engine, in a process group of its own, as a terminal would give it."""
    port = str(free_port())
    command = [sys.executable, "-m", "tests.fake_server", "--port", port, *arguments]
    environment = {
        "ADAPTER_MODEL": str(model),
        "ADAPTER_USAGE_DB": "",
        "ADAPTER_LOG_LEVEL": "debug",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment, **settings},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        if wait:
            wait_until_ready(server)
        yield server
    finally:
        process.kill()
        process.wait()


def wait_until_inside(server: Server) -> None:
    deadline = time.monotonic() + 30
    while "adapter_num_requests_running 1.0" not in server.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def exit_code(server: Server, within_seconds: float) -> int:
    return server.process.wait(timeout=within_seconds)


def descendants(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def assert_all_gone(processes: list[psutil.Process]) -> None:
    assert len(processes) >= 2
    assert psutil.wait_procs(processes, timeout=5)[1] == []


def assert_drains(server: Server, body: dict[str, Any], send: Callable[[], None]) -> None:
    """The signal that `send` sends lets a request of `body` finish and tells newcomers."""
    children = descendants(server)
    with httpx.Client(base_url=server.url) as http:  # its idle connection holds nothing up
        http.get("/live")
        asking = Asking(server, body)
        wait_until_inside(server)
        send()
        time.sleep(0.3)
        newcomer = server.post("/generate", {})
        health, live = server.get("/health"), server.get("/live")
        assert asking.result() == (200, None)
        assert exit_code(server, 30) == 0
    assert_all_gone(children)
    assert newcomer.status_code == 503
    assert newcomer.json()["error"]["code"] == "draining"
    assert int(newcomer.headers["retry-after"]) > 0
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert live.status_code == 200
    log = server.log.read_text()
    assert log.count("route=/generate") == 2
    assert SECRET not in log and "Traceback" not in log


def test_at_sigterm_those_inside_finish_and_newcomers_are_told(
    random_model: Path, tmp_path: Path
) -> None:
    settings = {"ADAPTER_ENGINE": "transformers", "ADAPTER_LOG_LEVEL": "debug"}
    with running_server(random_model, tmp_path / "log", settings) as server:
        assert_drains(server, BATCH, server.process.terminate)


def test_ctrl_c_drains_too_although_it_reaches_the_engines_process(
    random_model: Path, tmp_path: Path
) -> None:
    with fake_server(random_model, tmp_path / "log") as server:
        assert_drains(server, SHORT, lambda: os.killpg(server.process.pid, signal.SIGINT))
        assert "the engine was alive to the end: True" in server.log.read_text()


def test_a_second_signal_cuts_at_once(random_model: Path, tmp_path: Path) -> None:
    with fake_server(random_model, tmp_path / "log") as server:
        children = descendants(server)
        asking = Asking(server, LONG)
        wait_until_inside(server)
        for _ in range(2):
            os.kill(server.process.pid, signal.SIGTERM)
            time.sleep(0.3)
        assert exit_code(server, 8) == 128 + signal.SIGTERM
        assert asking.result() == (503, "draining")
    assert_all_gone(children)


def test_a_third_signal_kills(random_model: Path, tmp_path: Path) -> None:
    with fake_server(random_model, tmp_path / "log") as server:
        children = descendants(server)
        asking = Asking(server, LONG)
        wait_until_inside(server)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(server.process.pid, number)
            time.sleep(0.01)
        assert exit_code(server, 2) == 128 + signal.SIGINT
        asking.join()
    assert_all_gone(children)


def test_who_is_not_done_at_the_limit_is_cut_off(random_model: Path, tmp_path: Path) -> None:
    with fake_server(random_model, tmp_path / "log", ADAPTER_DRAIN_SECONDS="1") as server:
        asking = Asking(server, LONG)
        wait_until_inside(server)
        began = time.monotonic()
        os.kill(server.process.pid, signal.SIGTERM)
        assert asking.result() == (503, "draining")
        assert 1 <= asking.ended_at - began < 4
        assert exit_code(server, 10) == 0


def test_an_engine_that_is_still_starting_ends_at_once(random_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with fake_server(random_model, log, wait=False, FAKE_START_SECONDS="60") as server:
        deadline = time.monotonic() + 30
        while len(descendants(server)) < 2:  # the engine's process and a tracker
            assert time.monotonic() < deadline
            time.sleep(0.1)
        children = descendants(server)
        server.process.terminate()
        assert exit_code(server, 5) == 0
    assert_all_gone(children)
