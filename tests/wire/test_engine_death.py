"""The engine's processes are killed under a batch: its answers arrive all the same."""

import threading
import time
from typing import Any

import psutil
import pytest

from tests.server import Server
from tests.wire.audio import as_base64, song

SEEDED = {"do_sample": True, "temperature": 1.2, "seed": 11}


def engine_processes(server: Server) -> list[psutil.Process]:
    """vLLM's core and its workers."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if child.name().startswith("VLLM::")]


@pytest.mark.vllm_only
def test_all_answers_arrive_and_equal_those_of_an_undisturbed_run(server: Server) -> None:
    prompts: list[dict[str, Any]] = [
        {"prompt": f"Part {i}?", "max_new_tokens": 100, **(SEEDED if i % 2 else {})}
        for i in range(13)
    ]
    body = {"audio": as_base64(song(40)), "prompts": prompts}
    undisturbed = server.post("/generate_batch", body).json()

    seen = {process.pid for process in engine_processes(server)}
    statuses: set[str] = set()
    disturbance = threading.Thread(target=kill_soon, args=(server, statuses))
    disturbance.start()
    disturbed = server.post("/generate_batch", body)
    disturbance.join()

    assert disturbed.status_code == 200
    answers = disturbed.json()["answers"]
    assert [answer["error"] for answer in answers] == [None] * 13
    assert [answer["response"] for answer in answers] == [
        answer["response"] for answer in undisturbed["answers"]
    ]
    assert "restarting" in statuses
    assert not seen & {process.pid for process in engine_processes(server)}
    assert not any(psutil.pid_exists(pid) for pid in seen)  # no zombie either
    assert server.get("/health").status_code == 200


def kill_soon(server: Server, statuses: set[str]) -> None:
    """Kill the engine in the middle of its batch, then note what /health says."""
    deadline = time.monotonic() + 30
    while "adapter_num_requests_running 0.0" in server.get("/metrics").text:
        assert time.monotonic() < deadline
    for process in engine_processes(server):
        process.kill()
    deadline = time.monotonic() + 5
    while "restarting" not in statuses and time.monotonic() < deadline:
        statuses.add(server.get("/health").json()["status"])
        time.sleep(0.05)
