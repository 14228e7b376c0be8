"""`python -m adapter report` without --server: the server that it starts, and its end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from adapter.sections import ContentAdvisory, MoodTags
from tests.songs import encode, melody

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


def started(song: Path, *options: str, **environment: str) -> "subprocess.Popen[str]":
    """The command in a group of its own, as a terminal would give it."""
    command = [sys.executable, "-m", "adapter", "report", str(song), "--out", f"{song}.jsonl"]
    return subprocess.Popen(
        [*command, *options],
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
    song: Path, random_model: Path, number: signal.Signals, exit_code: int
) -> None:
    process = started(song, ADAPTER_MODEL=str(random_model))
    server = its_server(process)
    time.sleep(0.5)
    os.killpg(process.pid, number)
    process.communicate(timeout=20)
    assert process.returncode == exit_code
    assert not server.is_running()
    assert logs(song) == []


def test_the_server_does_not_outlive_a_killed_run(song: Path, random_model: Path) -> None:
    process = started(song, ADAPTER_MODEL=str(random_model))
    server = its_server(process)
    process.kill()
    process.communicate(timeout=20)
    _, alive = psutil.wait_procs([server], timeout=20)
    for left in alive:
        left.kill()
    assert alive == []


def test_two_songs_get_their_reports_from_a_server_that_lasts_as_long_as_the_run(
    tmp_path: Path, random_model: Path
) -> None:
    songs = tmp_path / "songs"
    songs.mkdir()
    for seed in (1, 2):
        song = encode(melody(2, num_channels=1, seed=seed), "wav-16")
        (songs / f"{seed}.wav").write_bytes(song)
    options = ("--sections", "mood_tags", "content_advisory", "--seed", "1")
    process = started(songs, *options, ADAPTER_MODEL=str(random_model))
    server = its_server(process)
    table, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert not server.is_running()
    assert logs(songs) == []
    rows = [row.split() for row in table.splitlines()]
    lengths = [row[1:2] for row in rows if row[:1] in ([f"{songs}/1.wav"], [f"{songs}/2.wav"])]
    assert lengths == [["0:02"], ["0:02"]]
    assert any(row[:5] == ["2", "songs,", "0", "failed", "0:04"] for row in rows)

    for line in Path(f"{songs}.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert list(record["report"]) == ["mood", "content_advisory", "measured"]
        assert MoodTags.model_validate(record["report"]["mood"])
        assert ContentAdvisory.model_validate(record["report"]["content_advisory"])
        assert [one["preset"] for one in record["sections"]] == ["mood_tags", "content_advisory"]
        costs = [one["cost_usd"] for one in record["sections"]]
        assert record["cost_usd"] == pytest.approx(sum(costs))
        assert min(costs) > 0

    again = started(songs, *options, ADAPTER_MODEL=str(random_model))
    assert again.communicate(timeout=20)[1].startswith("2 of 2 songs are in")
