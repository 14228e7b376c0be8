"""`python -m adapter report` without --server: the server that it starts, and its end."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REAL = {
    "ADAPTER_ENGINE": "transformers",
    "ADAPTER_DTYPE": "float32",
    "ADAPTER_USAGE_DB": "",
    "ADAPTER_CLIENT_KEY": "of-another-server",
    "ADAPTER_API_KEYS": "ann:hunter2",
    "ADAPTER_METRICS_KEYS": "ann",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture
def song(tmp_path: Path) -> Path:
    path = tmp_path / "song.wav"
    path.write_bytes(b"no song")
    return path


def started(song: Path, **environment: str) -> "subprocess.Popen[str]":
    """The command in a group of its own, as a terminal would give it."""
    return subprocess.Popen(
        [sys.executable, "-m", "adapter", "report", str(song), "--out", f"{song}.jsonl"],
        env={**os.environ, **REAL, "TMPDIR": str(song.parent), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def its_server(process: "subprocess.Popen[str]") -> psutil.Process:
    """The server, once the command says that it starts one."""
    assert process.stderr is not None
    assert "starting a server" in process.stderr.readline()
    (server,) = psutil.Process(process.pid).children()
    assert "serve" in server.cmdline()
    return server


def logs(song: Path) -> list[Path]:
    return list(song.parent.glob("*.log"))


def test_a_server_that_does_not_start_is_told_with_its_last_word_and_its_log(song: Path) -> None:
    process = started(song, ADAPTER_MODEL="/nowhere", ADAPTER_MAX_PROMPTS="none")
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    told = re.search(r"error: the server ended with status 1; its log is (\S+): (.*)", error)
    assert told is not None
    assert "ADAPTER_MAX_PROMPTS='none'" in told[2]
    assert told[2] in Path(told[1]).read_text()
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_a_signal_ends_the_server_too(
    song: Path, demo_model: Path, number: signal.Signals, exit_code: int
) -> None:
    process = started(song, ADAPTER_MODEL=str(demo_model))
    server = its_server(process)
    time.sleep(0.5)
    os.killpg(process.pid, number)
    process.communicate(timeout=20)
    assert process.returncode == exit_code
    assert not server.is_running()
    assert logs(song) == []


def test_the_server_does_not_outlive_a_killed_run(song: Path, demo_model: Path) -> None:
    process = started(song, ADAPTER_MODEL=str(demo_model))
    server = its_server(process)
    process.kill()
    process.communicate(timeout=20)
    _, alive = psutil.wait_procs([server], timeout=20)
    for left in alive:
        left.kill()
    assert alive == []
