"""The adapter as its users meet it: `python -m adapter serve`, and one POST for all prompts."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.memory import find_peak_bytes
from benchmarks.workload import (
    WARM_UP_PROMPT,
    Answer,
    Outcome,
    Report,
    Run,
    SongState,
    Workload,
    find_device,
)

START_SECONDS = 3600  # a large checkpoint may have to be downloaded first
SERVE = (sys.executable, "-m", "adapter", "serve")
MEDIA_TYPES = {".wav": "audio/wav", ".mp3": "audio/mpeg"}
# One for all requests, since making one loads certificates for 20 ms; each has its own connection.
CLIENT = httpx.Client(
    timeout=None, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
)


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]


def run_vllm(workload: Workload, report: Report) -> Outcome:
    """On vLLM: each song new, then once more with its prefix cached."""
    return _run("vllm", workload, ("new", "known"), report)


def run_transformers(workload: Workload, report: Report) -> Outcome:
    """On transformers, in groups of its default size unless another one is asked for."""
    return _run("transformers", workload, ("new",), report)


def _run(engine: str, workload: Workload, states: tuple[SongState, ...], report: Report) -> Outcome:
    settings = make_settings(workload, engine)
    device = find_device()
    report(0, "starting")
    started = time.perf_counter()
    batch: dict[str, Any] = {"prompts": prompts_of(workload.prompts, workload.max_new_tokens)}
    if workload.group_size is not None:
        batch["group_size"] = workload.group_size
    with running_server(settings) as server:
        start_seconds = time.perf_counter() - started
        ask(server.url, workload.warm_up_song, {"prompts": prompts_of([WARM_UP_PROMPT], 4)})
        runs = [
            _run_round(server.url, batch, workload, round_index, state, report)
            for round_index in range(len(workload.rounds))
            for state in states
        ]
        peak_bytes = find_peak_bytes(server.process.pid)
    return Outcome(tuple(runs), device, start_seconds, peak_bytes, settings)


def make_settings(workload: Workload, engine: str) -> dict[str, str]:
    """The server's ADAPTER_* variables for a workload."""
    return settings_of(workload.model, engine, workload.dtype) | {
        "ADAPTER_REVISION": workload.revision,
        "ADAPTER_MAX_GROUP_SIZE": str(max(16, workload.group_size or 0)),
        "ADAPTER_MAX_PROMPTS": str(max(64, len(workload.prompts))),
        "ADAPTER_MAX_QUEUED": str(max(256, workload.num_prompts_a_round)),
        "ADAPTER_MAX_NEW_TOKENS": str(max(2048, workload.max_new_tokens)),
    }


def settings_of(model: str, engine: str, dtype: str) -> dict[str, str]:
    """The caller's ADAPTER_* variables, and those that a comparison rests on."""
    given = {name: value for name, value in os.environ.items() if name.startswith("ADAPTER_")}
    given.pop("ADAPTER_API_KEYS", None)
    return {
        "ADAPTER_LOG_LEVEL": "warning",
        "ADAPTER_REQUEST_TIMEOUT_SECONDS": "86400",
        **given,
        "ADAPTER_MODEL": model,
        "ADAPTER_ENGINE": engine,
        "ADAPTER_DTYPE": dtype,
    }


@contextmanager
def running_server(
    environment: Mapping[str, str], command: Sequence[str] = SERVE
) -> Iterator[Server]:
    """A server on a free port, ready, and ended when the block ends.

    `command` takes `--port`; of the caller's environment it gets all but the ADAPTER_* variables.
    What it prints goes to stderr.
    """
    port = _free_port()
    others = {name: text for name, text in os.environ.items() if not name.startswith("ADAPTER_")}
    process = subprocess.Popen(
        [*command, "--port", str(port)], env=others | dict(environment), stdout=sys.stderr
    )
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=120)


def _run_round(
    url: str,
    batch: Mapping[str, Any],
    workload: Workload,
    round_index: int,
    state: SongState,
    report: Report,
) -> Run:
    doing = f"answering, song {state}"
    report(0, doing)
    songs = workload.rounds[round_index]
    started = time.perf_counter()
    with ThreadPoolExecutor(len(songs)) as clients:
        bodies = list(clients.map(lambda song: ask(url, song, batch), songs))
    wall_seconds = time.perf_counter() - started
    report(workload.num_prompts_a_round, doing)
    answers = [
        _answer(index, answer) for body in bodies for index, answer in enumerate(body["answers"])
    ]
    billed_seconds = sum(body["elapsed_seconds"] for body in bodies)
    return Run(round_index, state, wall_seconds, tuple(answers), billed_seconds)


def prompts_of(prompts: Sequence[str], max_new_tokens: int) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "max_new_tokens": max_new_tokens} for prompt in prompts]


def ask(url: str, song: Path, batch: Mapping[str, Any]) -> dict[str, Any]:
    """POST the song as a file beside the prompts. Raises RuntimeError with the server's words."""
    parts: dict[str, Any] = {
        "request": (None, json.dumps(batch), "application/json"),
        "audio": (song.name, song.read_bytes(), MEDIA_TYPES[song.suffix]),
    }
    response = CLIENT.post(f"{url}/generate_batch", files=parts)
    if response.status_code != 200:
        raise RuntimeError(f"the server answered {response.status_code}: {response.text}")
    return dict(response.json())


def _answer(index: int, answer: Mapping[str, Any]) -> Answer:
    if answer["error"] is not None:
        raise RuntimeError(f"prompt {index} failed: {answer['error']['message']}")
    return Answer(answer["response"], answer["usage"]["completion_tokens"])


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        exit_code = server.process.poll()
        if exit_code is not None:
            raise RuntimeError(f"the server ended with {exit_code} before it was ready")
        try:
            if CLIENT.get(f"{server.url}/health", timeout=30).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {START_SECONDS} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
