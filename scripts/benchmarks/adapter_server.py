"""The adapter as its users meet it: `python -m adapter serve`, and one POST for all prompts."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

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


def run_vllm(workload: Workload, report: Report) -> Outcome:
    """On vLLM: each song new, then once more with its prefix cached."""
    return _run("vllm", workload, ("new", "known"), report)


def run_transformers(workload: Workload, report: Report) -> Outcome:
    """On transformers, in groups of the size that the other path in groups has."""
    return _run("transformers", workload, ("new",), report)


def _run(engine: str, workload: Workload, states: tuple[SongState, ...], report: Report) -> Outcome:
    settings = make_settings(workload, engine)
    device = find_device()
    report(0, "starting")
    started = time.perf_counter()
    batch: dict[str, Any] = {"prompts": _prompts(workload.prompts, workload.max_new_tokens)}
    if engine == "transformers":  # vLLM batches by itself: without a window it takes all at once
        batch["group_size"] = workload.group_size
    with running_server(settings) as url:
        start_seconds = time.perf_counter() - started
        _ask(url, workload.warm_up_song, {"prompts": _prompts([WARM_UP_PROMPT], 4)})
        runs = [
            _run_song(url, batch, workload.songs, song_index, state, report)
            for song_index in range(len(workload.songs))
            for state in states
        ]
    return Outcome(tuple(runs), device, start_seconds, settings)


def make_settings(workload: Workload, engine: str) -> dict[str, str]:
    """The server's ADAPTER_* variables: the caller's, and those that the comparison rests on."""
    given = {name: value for name, value in os.environ.items() if name.startswith("ADAPTER_")}
    given.pop("ADAPTER_API_KEYS", None)
    return {
        "ADAPTER_LOG_LEVEL": "warning",
        "ADAPTER_REQUEST_TIMEOUT_SECONDS": "86400",
        **given,
        "ADAPTER_MODEL": workload.model,
        "ADAPTER_REVISION": workload.revision,
        "ADAPTER_ENGINE": engine,
        "ADAPTER_DTYPE": workload.dtype,
        "ADAPTER_MAX_GROUP_SIZE": str(max(8, workload.group_size)),
        "ADAPTER_MAX_PROMPTS": str(max(64, len(workload.prompts))),
        "ADAPTER_MAX_NEW_TOKENS": str(max(2048, workload.max_new_tokens)),
    }


@contextmanager
def running_server(settings: Mapping[str, str]) -> Iterator[str]:
    """A server on a free port, ended when the block ends; yields its URL."""
    port = _free_port()
    others = {name: text for name, text in os.environ.items() if not name.startswith("ADAPTER_")}
    command = [sys.executable, "-m", "adapter", "serve", "--port", str(port)]
    process = subprocess.Popen(command, env=others | dict(settings))
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=120)


def _run_song(
    url: str,
    batch: Mapping[str, Any],
    songs: Sequence[Path],
    song_index: int,
    state: SongState,
    report: Report,
) -> Run:
    doing = f"answering, song {state}"
    report(0, doing)
    started = time.perf_counter()
    body = _ask(url, songs[song_index], batch)
    wall_seconds = time.perf_counter() - started
    report(len(batch["prompts"]), doing)
    answers = tuple(_answer(index, answer) for index, answer in enumerate(body["answers"]))
    return Run(song_index, state, wall_seconds, answers, billed_seconds=body["elapsed_seconds"])


def _prompts(prompts: Sequence[str], max_new_tokens: int) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "max_new_tokens": max_new_tokens} for prompt in prompts]


def _ask(url: str, song: Path, batch: Mapping[str, Any]) -> dict[str, Any]:
    """POST the song as a file beside the prompts. Raises RuntimeError with the server's words."""
    parts: dict[str, Any] = {
        "request": (None, json.dumps(batch), "application/json"),
        "audio": (song.name, song.read_bytes(), "audio/wav"),
    }
    response = httpx.post(f"{url}/generate_batch", files=parts, timeout=None)
    if response.status_code != 200:
        raise RuntimeError(f"the server answered {response.status_code}: {response.text}")
    return dict(response.json())


def _answer(index: int, answer: Mapping[str, Any]) -> Answer:
    if answer["error"] is not None:
        raise RuntimeError(f"prompt {index} failed: {answer['error']['message']}")
    return Answer(answer["response"], answer["usage"]["completion_tokens"])


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it was ready")
        try:
            if httpx.get(f"{url}/health", timeout=30).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {START_SECONDS} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
