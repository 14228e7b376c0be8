"""The benchmarks that watch a server: the import, and how what they read is judged; tests/soak has
those that start one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from benchmarks import overhead  # noqa: E402
from benchmarks.loop_hold import read_delays  # noqa: E402
from benchmarks.many_songs import more, summarize  # noqa: E402


def run(module: str, *options: str) -> dict[str, Any]:
    """The JSON document of a benchmark."""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), "ADAPTER_USAGE_DB": ""}
    command = [sys.executable, "-m", f"benchmarks.{module}", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.stdout, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print("\n".join(done.stdout.splitlines()[:-1]))
    return document


def test_the_api_is_imported_without_what_the_engines_need() -> None:
    document = run("start", "--imports", "3", "--starts", "0")
    seconds = document["imports"]["seconds"]
    assert document["imports"]["loaded"] == []
    assert min(seconds["adapter.api"]) < 4 * min(seconds["fastapi"])


def test_a_delay_counts_only_while_the_songs_arrive(tmp_path: Path) -> None:
    (tmp_path / "delays").write_text(
        "[1, 9.0, 9.0]\n[2, 0.1, 0.1]\n[3, 0.3, 0.2]\n[4.5, 8.0, 8.0]\n"
    )
    assert read_delays(tmp_path / "delays", (1.5, 4.0)) == [(0.3, 0.2), (0.1, 0.1)]


def test_memory_is_held_against_what_it_was_after_twenty_songs() -> None:
    growing = [{"server 1": 100 + song, "decoder 2": 50} for song in range(41)]
    growing[30].pop("decoder 2")  # ended: its successor has another id
    (server,) = summarize(growing)
    assert (server.settled_bytes, server.most_bytes, server.last_bytes) == (122, 140, 140)
    assert server.deviation == 18 / 122


def test_a_file_that_is_there_once_more_was_left() -> None:
    assert more(["/memfd:a", "/memfd:a", "b"], ["/memfd:a", "c"]) == ["/memfd:a", "b"]


def test_both_doors_are_asked_in_turns_each_about_songs_of_its_own() -> None:
    asked: list[tuple[str, str]] = []

    def way(name: str) -> Callable[[Path], float]:
        def ask(song: Path) -> float:
            asked.append((name, song.name))
            return float(len(asked))

        return ask

    songs = [Path(name) for name in "abcd"]
    http, direct = overhead.take_turns(way("http"), way("direct"), songs)
    first, second = [("http", "a"), ("direct", "b")], [("direct", "d"), ("http", "c")]
    assert asked == [one for turn in (first, second) for one in turn for _ in ("new", "known")]
    assert (http, direct) == ({"new": [1, 7], "known": [2, 8]}, {"new": [3, 5], "known": [4, 6]})


@pytest.mark.parametrize(("limit", "exit_code"), [("1.6", 0), ("1.4", 1)])
def test_the_overhead_is_the_ratio_of_the_medians(
    limit: str, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    http: overhead.Seconds = {"new": [9.0, 3.0, 2.0], "known": [1.0]}
    direct: overhead.Seconds = {"new": [2.0, 1.0, 7.0], "known": [1.0]}
    assert overhead.finish(overhead.parse(["--new", limit]), http, direct) == exit_code
    lines = capsys.readouterr().out.splitlines()
    assert "3.000 s, engine alone 2.000 s: 1.500 times" in lines[0]
    assert json.loads(lines[-1])["ratios"] == {"new": 1.5, "known": 1.0}
