"""Starting the server: by our command and by uvicorn's, and what stops the start."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import running_server

TRANSFORMERS = {"ADAPTER_ENGINE": "transformers"}


def run(*command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **settings}
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_importing_the_app_loads_neither_torch_nor_vllm_nor_librosa() -> None:
    code = (
        "import adapter.api, sys; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'librosa') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_uvicorn_serves_the_same_app(random_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uvicorn", "adapter.api:app"]
    with running_server(random_model, tmp_path / "log", TRANSFORMERS, command) as server:
        assert server.post("/generate", {"max_new_tokens": 2}).status_code == 200


def test_more_than_one_worker_is_refused() -> None:
    done = run("uvicorn", "adapter.api:app", "--port", "0", "--workers", "2", **TRANSFORMERS)
    assert "one worker only" in done.stderr


@pytest.mark.parametrize("command", [("adapter", "serve"), ("uvicorn", "adapter.api:app")])
def test_a_bad_setting_stops_the_start_with_one_line(command: tuple[str, ...]) -> None:
    done = run(*command, ADAPTER_MAX_PROMPTS="many")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "ADAPTER_MAX_PROMPTS" in line and "many" in line and "integer" in line


@pytest.mark.parametrize("command", [("adapter", "serve"), ("uvicorn", "adapter.api:app")])
def test_a_model_that_is_not_there_ends_the_server_with_one_line(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    missing = str(tmp_path / "nothing")
    done = run(*command, "--port", "0", ADAPTER_MODEL=missing, ADAPTER_USAGE_DB="", **TRANSFORMERS)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
    assert len(errors) == 1 and "config.json" in errors[0]
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_stops_the_start_before_an_engine_is_started() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("adapter", "serve", "--port", port, **TRANSFORMERS)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: --host 127.0.0.1 --port {port}: cannot listen there")
    assert len(done.stderr.splitlines()) == 1


def test_the_random_model_command_writes_a_checkpoint_once(tmp_path: Path) -> None:
    target = str(tmp_path / "model")
    assert run("adapter", "demo-model", target).returncode == 0
    again = run("adapter", "demo-model", target)
    assert again.returncode == 1
    assert again.stderr.startswith("error: ") and "Traceback" not in again.stderr
