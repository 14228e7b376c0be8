"""What an operator relies on, on the real engine: sums, kills, queues, disconnects, deaths, hangs.

Each test starts servers of its own, so that one can be killed; its figures are printed (`-s`).
"""

import math
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server import LONG_LIST, Server, running_server
from tests.wire.audio import as_base64, song
from tests.wire.test_engine_death import engine_processes

pytestmark = [pytest.mark.soak, pytest.mark.vllm, pytest.mark.timeout(1800)]

SEEDED = {"do_sample": True, "temperature": 1.2, "seed": 11}
STALL_SECONDS = 15
SONGS = [as_base64(song(seconds, seed=index)) for index, seconds in enumerate((5, 20, 35))]


@contextmanager
def serving(
    model: Path, folder: Path, engine: str, settings: Mapping[str, str] | None = None
) -> Iterator[Server]:
    usage = {"ADAPTER_ENGINE": engine, "ADAPTER_USAGE_DB": str(folder / "usage.sqlite3")}
    with running_server(model, folder / "log", usage | dict(settings or {})) as server:
        yield server


def batch(count: int, *, max_new_tokens: int = 24, which_song: int = 0) -> dict[str, Any]:
    prompts = [
        {"prompt": f"Part {i}?", "max_new_tokens": max_new_tokens, **(SEEDED if i % 2 else {})}
        for i in range(count)
    ]
    return {"audio": SONGS[which_song], "prompts": prompts}


LONG_PROMPT = {"max_new_tokens": 1500, "json_schema": LONG_LIST}
LONG_BATCH = {"audio": SONGS[0], "prompts": [LONG_PROMPT] * 6}  # seconds on any machine


def metric(server: Server, name: str) -> float:
    """The sum over a metric's series."""
    lines = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return math.fsum(map(float, lines))


def wait_until(condition: Callable[[], bool], timeout_seconds: float) -> float:
    """Seconds until it holds. Raises AssertionError past the time-out."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_seconds, "did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - started


def records(folder: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "usage.sqlite3") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        query = "SELECT request_id, http_request_id, elapsed_seconds, outcome FROM usage"
        return list(database.execute(query))


def test_the_sums_agree_after_40_batches_of_8_clients_a_fifth_cut_off_and_one_death(
    random_model: Path, tmp_path: Path
) -> None:
    answered: dict[str, float] = {}
    cut_off: set[str] = set()

    def client(number: int) -> None:
        for turn in range(5):
            name = f"client-{number}-turn-{turn}"
            leaves = (number * 5 + turn) % 5 == 4
            which_song = (number + turn) % 3
            body = LONG_BATCH if leaves else batch(6, max_new_tokens=60, which_song=which_song)
            try:
                response = httpx.post(
                    server.url + "/generate_batch",
                    json=body,
                    headers={"X-Request-Id": name},
                    timeout=0.3 if leaves else 300,
                )
            except httpx.ReadTimeout:
                cut_off.add(name)
                continue
            if response.status_code == 200:
                answered[name] = response.json()["elapsed_seconds"]
            else:  # while it restarts
                wait_until(lambda: server.get("/health").status_code == 200, 300)

    with serving(random_model, tmp_path, "vllm") as server:
        first = LONG_PROMPT | {"max_new_tokens": 1}  # later ones find its schema compiled
        named = {"X-Request-Id": "first"}
        response = httpx.post(server.url + "/generate", json=first, headers=named, timeout=60)
        answered["first"] = response.json()["elapsed_seconds"]
        with ThreadPoolExecutor(8) as clients:
            done = [clients.submit(client, number) for number in range(8)]
            wait_until(lambda: len(answered) > 5, 300)
            for process in engine_processes(server):
                process.kill()
        for one in done:
            one.result()
        wait_until(lambda: metric(server, "adapter_num_requests_running") == 0, 60)
        busy = metric(server, "adapter_engine_busy_seconds_total")
        billed = metric(server, "adapter_billed_seconds_total")
        lost = metric(server, "adapter_lost_seconds_total")
        assert metric(server, "adapter_engine_restarts_total") == 1
    rows = records(tmp_path)
    sent = math.fsum(answered.values())
    left = [row for row in rows if row[1] not in answered]  # the shares of those who went away
    left_seconds = math.fsum(row[2] for row in left)
    print(f"\nbusy {busy:.6f} s, billed {billed:.6f} s, lost {lost:.3f} s, {len(rows)} records")
    print(
        f"{len(answered)} batches answered for {sent:.6f} s, {len(cut_off)} cut off for "
        f"{left_seconds:.6f} s: together {sent + left_seconds:.6f} s"
    )
    assert len(cut_off) >= 8
    assert {row[1] for row in left} <= cut_off
    assert "aborted" in {row[3] for row in left}
    assert billed == pytest.approx(busy, rel=1e-6)
    assert sent + left_seconds == pytest.approx(busy, rel=1e-6)


@pytest.mark.parametrize(("engine", "kills"), [("transformers", 20), ("vllm", 2)])
def test_a_killed_server_loses_no_record_of_an_answer_that_was_sent(
    random_model: Path, tmp_path: Path, engine: str, kills: int
) -> None:
    sent: list[str] = []
    for kill in range(kills):
        with ExitStack() as stack:
            server = stack.enter_context(serving(random_model, tmp_path, engine))
            victims = [server.process.pid, *(p.pid for p in engine_processes(server))]
            stop = threading.Event()
            clients = [
                threading.Thread(target=ask_until, args=(server, f"{kill}-{n}", stop, sent))
                for n in range(3)
            ]
            for one in clients:
                one.start()
            time.sleep(random.Random(kill).uniform(1.0, 3.0))
            os.kill(server.process.pid, signal.SIGKILL)
            stop.set()
            for one in clients:
                one.join()
        known = {row[1] for row in records(tmp_path)}
        assert not [name for name in sent if name not in known]
    print(f"\n{engine}: {kills} kills, {len(sent)} answers sent, all recorded, 0 corrupt stores")
    if engine == "vllm":  # the last one's engine: the next start ends it
        with serving(random_model, tmp_path, "transformers"):
            assert not [pid for pid in victims if psutil.pid_exists(pid)]
    assert len(sent) > kills


def ask_until(server: Server, name: str, stop: threading.Event, sent: list[str]) -> None:
    """Ask small batches; note the request ids of those that were answered."""
    for number in range(10_000):
        if stop.is_set():
            return
        request_id = f"{name}-{number}"
        try:
            response = httpx.post(
                server.url + "/generate_batch",
                json=batch(2, max_new_tokens=4),
                headers={"X-Request-Id": request_id},
                timeout=60,
            )
        except httpx.TransportError:
            return
        if response.status_code == 200:
            sent.append(request_id)


@pytest.fixture(scope="module")
def vllm_server(
    random_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    """A server on vLLM for the tests that leave it alive, and its folder; a small queue, and little
    patience with a silent engine."""
    folder = tmp_path_factory.mktemp("vllm")
    settings = {
        "ADAPTER_MAX_QUEUED": "64",
        "ADAPTER_MAX_NUM_SEQS": "8",
        "ADAPTER_STALL_SECONDS": str(STALL_SECONDS),
    }
    with serving(random_model, folder, "vllm", settings) as server:
        yield server, folder


def test_300_prompts_of_30_clients_against_a_queue_of_64(
    vllm_server: tuple[Server, Path],
) -> None:
    server, folder = vllm_server
    with ThreadPoolExecutor(31) as clients:
        asked = [clients.submit(server.post, "/generate_batch", batch(10)) for _ in range(30)]
        statuses = [one.result().status_code for one in asked]
    assert set(statuses) == {200, 503}
    with ThreadPoolExecutor(2) as clients:
        big = clients.submit(server.post, "/generate_batch", batch(64, max_new_tokens=100))
        wait_until(lambda: metric(server, "adapter_num_requests_running") == 8, 60)
        single = server.post("/generate", {"prompt": "And me?", "max_new_tokens": 8}).json()
        big_seconds = big.result().json()["timings"]["wall_seconds"]
    waited = single["timings"]["queue_seconds"]
    print(f"\n{statuses.count(200)} batches answered, {statuses.count(503)} refused with 503")
    print(f"the single prompt waited {waited:.3f} s, the big batch took {big_seconds:.3f} s")
    assert waited < big_seconds / 4
    assert not [row for row in records(folder) if row[3] not in ("stop", "length")]


def test_50_disconnects_leave_nothing_in_the_engine_and_no_file(
    vllm_server: tuple[Server, Path],
) -> None:
    server, _ = vllm_server
    files = Path(f"/proc/{server.process.pid}/fd")

    def held() -> list[str]:
        names = [str(link.readlink()) for link in files.iterdir() if link.is_symlink()]
        return sorted(name for name in names if "/tmp/" in name or "memfd:" in name)

    server.post("/generate", LONG_PROMPT | {"max_new_tokens": 1})  # later ones find its schema
    for which_song in range(3):  # which the server then keeps for a while
        server.post("/generate_batch", batch(2, which_song=which_song))
    before = held()

    def leave(number: int) -> bool:
        body = {"audio": SONGS[number % 3], "prompts": [LONG_PROMPT] * 8}
        try:
            server.post("/generate_batch", body, timeout_seconds=0.05 + number % 10 / 50)
        except httpx.TimeoutException:
            return True
        return False

    with ThreadPoolExecutor(5) as clients:
        assert sum(clients.map(leave, range(60))) >= 50
    took = wait_until(
        lambda: (
            metric(server, "adapter_num_requests_running") == 0
            and metric(server, "vllm:num_requests_running") == 0
        ),
        1.5,
    )
    wait_until(lambda: held() == before, 5.0)
    print(f"\n50 disconnects: the engine was empty {took:.2f} s after the last, no file left")


@pytest.fixture(scope="module")
def undisturbed(vllm_server: tuple[Server, Path]) -> tuple[dict[str, Any], list[str]]:
    """A batch about a song of ten minutes, whose prefill takes seconds, and its answers before
    any kill."""
    body = batch(13, max_new_tokens=100)
    body["audio"] = as_base64(song(600, seed=9))
    return body, texts(vllm_server[0].post("/generate_batch", body))


# In this order: the engine that the first leaves has nothing of the song in its cache, so that the
# second meets it in the prefill.
@pytest.mark.parametrize("phase", ["between batches", "prefill", "decode"])
def test_an_engine_killed_in_any_phase_costs_no_answer(
    vllm_server: tuple[Server, Path], undisturbed: tuple[dict[str, Any], list[str]], phase: str
) -> None:
    server, _ = vllm_server
    body, expected = undisturbed
    restarts = metric(server, "adapter_engine_restarts_total")
    if phase == "between batches":
        kill_engine(server)
        wait_until(lambda: server.get("/health").status_code == 503, 5)
        wait_until(lambda: server.get("/health").status_code == 200, 300)
    generated = metric(server, "vllm:generation_tokens_total")
    started = time.monotonic()
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(server.post, "/generate_batch", body)
        if phase == "prefill":
            wait_until(lambda: metric(server, "adapter_num_requests_running") > 0, 60)
            kill_engine(server)
            # Fewer than a token each: some are in their prefill still.
            assert metric(server, "vllm:generation_tokens_total") - generated < 13
        if phase == "decode":
            wait_until(lambda: metric(server, "vllm:generation_tokens_total") > generated, 60)
            kill_engine(server)
        disturbed = texts(asked.result())
    took = time.monotonic() - started
    assert metric(server, "adapter_engine_restarts_total") == restarts + 1
    assert disturbed == expected
    print(f"\nkilled in {phase}: 13 answers, as undisturbed, after {took:.1f} s")


def texts(response: httpx.Response) -> list[str]:
    answers = response.json()["answers"]
    assert [answer["error"] for answer in answers] == [None] * 13
    return [answer["response"] for answer in answers]


def kill_engine(server: Server) -> None:
    for process in engine_processes(server):
        process.kill()


def test_a_stopped_engine_is_noticed_and_replaced_and_a_busy_one_is_not(
    vllm_server: tuple[Server, Path],
) -> None:
    server, _ = vllm_server
    restarts = metric(server, "adapter_engine_restarts_total")
    started = time.monotonic()

    def keep_busy(_: int) -> None:
        while time.monotonic() - started < 2 * STALL_SECONDS:
            server.post("/generate_batch", batch(64, max_new_tokens=1500))

    with ThreadPoolExecutor(2) as clients:  # two, so that the engine is never without a prompt
        list(clients.map(keep_busy, range(2)))
    busy_seconds = time.monotonic() - started
    assert metric(server, "adapter_engine_restarts_total") == restarts
    started = time.monotonic()
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(server.post, "/generate_batch", batch(13, max_new_tokens=300))
        wait_until(lambda: metric(server, "adapter_num_requests_running") > 0, 60)
        for process in engine_processes(server):
            process.suspend()
        texts(asked.result())
    took = time.monotonic() - started
    assert metric(server, "adapter_engine_restarts_total") == restarts + 1
    print(f"\nstopped: 13 answers after {took:.1f} s; one busy for {busy_seconds:.1f} s was left")


def test_two_servers_on_one_usage_log_are_refused(random_model: Path, tmp_path: Path) -> None:
    with serving(random_model, tmp_path, "transformers"):
        settings = {
            "ADAPTER_MODEL": str(random_model),
            "ADAPTER_ENGINE": "transformers",
            "ADAPTER_USAGE_DB": str(tmp_path / "usage.sqlite3"),
        }
        second = subprocess.run(
            [sys.executable, "-m", "adapter", "serve", "--port", "0"],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert second.returncode == 1
    assert "another server holds it" in second.stderr
