"""Start the server on the demo checkpoint, ask 13 questions about a song, print what they cost.

    python scripts/demo.py                 on vLLM's CPU backend
    ADAPTER_ENGINE=transformers python scripts/demo.py

Set ADAPTER_MODEL to use another checkpoint. The demo checkpoint's weights are random: its answers
mean nothing.
"""

import base64
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo_song import write_song

from adapter.random_model import write_random_model

START_SECONDS = 480
QUESTIONS = (
    "Describe this music.",
    "Which instruments do you hear?",
    "What is the tempo in beats a minute?",
    "Which key is it in?",
    "What is the mood?",
    "Name the genre and its roots.",
    "Transcribe the lyrics, or say that there are none.",
    "How is it mixed?",
    "Which chords are played?",
    "Who would listen to this?",
    "Which film scene would it suit?",
    "Name three similar artists.",
    "How should the artist go on from here?",
)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="music-flamingo-demo-") as name:
        folder = Path(name)
        song = folder / "song.wav"
        write_song(song, seconds=90)
        with server(_model(folder)) as url:
            health = _get(f"{url}/health")
            print(f"serving {health['model']} on {health['engine']} ({health['engine_reason']})")
            answer = _post(f"{url}/generate_batch", batch(song))
    print_answers(answer)
    return 0


def batch(song: Path) -> dict[str, Any]:
    """13 prompts about one song: two sampling settings and different caps."""
    prompts = [
        {"prompt": question, "max_new_tokens": 24 + 8 * (index % 4)}
        | ({"do_sample": True, "temperature": 0.7, "top_p": 0.9} if index % 3 == 2 else {})
        for index, question in enumerate(QUESTIONS)
    ]
    return {"audio": base64.b64encode(song.read_bytes()).decode(), "prompts": prompts}


def print_answers(answer: dict[str, Any]) -> None:
    for question, one in zip(QUESTIONS, answer["answers"], strict=True):
        usage = one["usage"]
        print(f"\n{question}\n  {one['response']!r}")
        print(
            f"  {one['elapsed_seconds']:.4f} s, ${one['cost_usd']:.7f}, {one['finish_reason']}, "
            f"{usage['completion_tokens']} tokens, {usage['cached_tokens']} of "
            f"{usage['prompt_tokens']} prompt tokens cached"
        )
    print(
        f"\n{len(answer['answers'])} answers on {answer['engine']}: "
        f"{answer['elapsed_seconds']:.3f} billed seconds, ${answer['cost_usd']:.6f}, "
        f"{answer['timings']['wall_seconds']:.3f} s wall"
    )


@contextmanager
def server(model: str) -> Iterator[str]:
    """A server on a free port, ended when the block ends; yields its URL."""
    url = f"http://127.0.0.1:{_free_port()}"
    environ = {
        "ADAPTER_ENGINE": "vllm",
        "ADAPTER_LOG_LEVEL": "warning",
        "ADAPTER_USAGE_DB": "",
    } | dict(os.environ)
    environ |= {"ADAPTER_MODEL": model}
    command = [sys.executable, "-m", "adapter", "serve", "--port", url.rsplit(":", 1)[1]]
    process = subprocess.Popen(command, env=environ)
    try:
        _wait_until_ready(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _model(folder: Path) -> str:
    if "ADAPTER_MODEL" in os.environ:
        return os.environ["ADAPTER_MODEL"]
    write_random_model(folder / "demo-model")
    return str(folder / "demo-model")


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    print("starting the engine (about a minute on two cores)", file=sys.stderr)
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"error: the server ended with {process.returncode}; its log is above")
        try:
            _get(f"{url}/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
        else:
            return
    sys.exit(f"error: the server was not ready within {START_SECONDS} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=10) as response:
        return dict(json.load(response))


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        sys.exit(f"error: {url} answered {error.code}: {error.read().decode()}")


if __name__ == "__main__":
    sys.exit(main())
