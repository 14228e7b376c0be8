"""`python -m adapter report`: against a server that answers by a script."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from adapter import report_client
from adapter.__main__ import main
from tests.fake_reports import DATA, NAMES, FakeServer, fake_reports

CODES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]")
BARS = re.compile(rb"all songs +\S+ 1/3 \S+ \$0\.750000\S+b\.FLAC +\S+ 1/3 \S+ \$0\.250000")
URL = "https://songs.example.com/a.mp3?signed=1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_client, "PAUSES_SECONDS", (0.01, 0.01, 0.01))
    monkeypatch.delenv("ADAPTER_CLIENT_KEY", raising=False)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "reports.jsonl"


@pytest.fixture
def songs(tmp_path: Path) -> Path:
    """A directory of three songs: a.mp3, b.FLAC, deep/c.ogg."""
    folder = tmp_path / "songs"
    (folder / "deep").mkdir(parents=True)
    for name in ("b.FLAC", "deep/c.ogg", "a.mp3"):
        (folder / name).write_bytes(name.encode())
    return folder


def report(server: FakeServer, out: Path, *arguments: str | Path) -> int:
    return main(["report", *map(str, arguments), "--out", str(out), "--server", server.url])


def started(
    server: FakeServer,
    out: Path,
    *arguments: str | Path,
    stderr: int = subprocess.PIPE,
    **environment: str,
) -> "subprocess.Popen[str]":
    """The command as a process of its own, in a group as a terminal would give it."""
    command = [sys.executable, "-m", "adapter", "report", *map(str, arguments)]
    return subprocess.Popen(
        [*command, "--out", str(out), "--server", server.url],
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, **environment},
        text=True,
        start_new_session=True,
    )


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def error_codes(out: Path) -> list[str | None]:
    return [line["error"]["code"] if "error" in line else None for line in lines(out)]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that the command ends with before anything is asked."""
    assert main(["report", *map(str, arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_directory_gives_a_line_for_each_of_its_songs(songs: Path, out: Path) -> None:
    with fake_reports() as server:
        assert report(server, out, songs) == 0
    paths = [songs / "a.mp3", songs / "b.FLAC", songs / "deep" / "c.ogg"]
    assert server.songs == [sha256(path) for path in paths]
    assert [line["song"] for line in lines(out)] == [str(path) for path in paths]
    line = lines(out)[0]
    assert line["sha256"] == sha256(paths[0])
    assert line["asked_sections"] is None
    assert line["report"] == {**DATA, "measured": {"duration_seconds": 61.0}}
    assert [section["preset"] for section in line["sections"]] == list(NAMES)
    assert "index" not in line["sections"][0]
    assert (line["elapsed_seconds"], line["cost_usd"], line["model"]) == (1.5, 0.75, "fake")


def test_hidden_files_and_what_is_no_audio_are_left_out(songs: Path, out: Path) -> None:
    for name in ("._a.mp3", "cover.jpg", ".trash/d.mp3"):
        (songs / name).parent.mkdir(exist_ok=True)
        (songs / name).write_bytes(name.encode())
    with fake_reports() as server:
        assert report(server, out, songs) == 0
    assert len(server.songs) == 3


def test_pipes_and_devices_in_a_directory_are_no_songs(songs: Path, out: Path) -> None:
    os.mkfifo(songs / "pipe.wav")
    (songs / "endless.wav").symlink_to("/dev/zero")
    with fake_reports() as server:
        assert report(server, out, songs) == 0
    assert len(server.songs) == 3


def test_a_song_may_have_a_name_that_is_no_text(songs: Path, out: Path) -> None:
    (songs / os.fsdecode(b"caf\xe9.wav")).write_bytes(b"a song")
    with fake_reports() as server:
        assert report(server, out, songs) == 0
    assert len(server.songs) == 4


def test_an_empty_argument_is_not_this_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected a file, a directory or an http(s) URL" in refusal(capsys, "")


def test_a_url_is_sent_as_it_is(out: Path) -> None:
    with fake_reports() as server:
        assert report(server, out, URL) == 0
    assert server.songs == [URL]
    assert (lines(out)[0]["song"], lines(out)[0]["sha256"]) == (URL, None)


def test_the_options_reach_the_server(songs: Path, out: Path) -> None:
    options = ("--sections", "mood_tags", "song_description", "--seed", "0", "--group-size", "2")
    with fake_reports() as server:
        assert report(server, out, songs / "a.mp3", *options) == 0
    (request,) = server.requests
    asked = {name: request[name] for name in request if name not in ("song", "at")}
    sections = ["mood_tags", "song_description"]
    assert asked == {"sections": sections, "seed": 0, "group_size": 2, "stream": True}
    assert lines(out)[0]["asked_sections"] == sections


def test_a_song_that_is_in_the_file_is_not_asked_again_nor_is_a_server_needed(
    songs: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_reports() as server:
        assert report(server, out, songs, URL) == 0
    table = capsys.readouterr().out
    assert len(server.songs) == 4
    # Without --server one is started, but for nothing.
    assert main(["report", str(songs), URL, "--out", str(out)]) == 0
    assert len(lines(out)) == 4
    assert capsys.readouterr().out.endswith(table)


def test_a_song_that_has_moved_is_not_asked_again(songs: Path, out: Path) -> None:
    with fake_reports() as server:
        report(server, out, songs / "a.mp3")
        (songs / "a.mp3").rename(songs / "deep" / "z.mp3")
        assert report(server, out, songs / "deep" / "z.mp3") == 0
    assert len(server.songs) == 1


def test_a_song_that_has_changed_is_asked_again(songs: Path, out: Path) -> None:
    with fake_reports() as server:
        report(server, out, songs / "a.mp3")
        (songs / "a.mp3").write_bytes(b"remixed")
        report(server, out, songs / "a.mp3")
    assert [line["sha256"] for line in lines(out)] == server.songs
    assert len(set(server.songs)) == 2


def test_other_sections_are_asked_for(songs: Path, out: Path) -> None:
    with fake_reports() as server:
        for sections in (["mood_tags"], ["mood_tags", "song_description"], ["mood_tags"]):
            report(server, out, songs / "a.mp3", "--sections", *sections)
    assert [request["sections"] for request in server.requests] == [
        ["mood_tags"],
        ["mood_tags", "song_description"],
    ]


def test_a_copy_is_not_paid_for_twice(songs: Path, out: Path) -> None:
    (songs / "copy.mp3").write_bytes((songs / "a.mp3").read_bytes())
    with fake_reports() as server:
        assert report(server, out, songs / "a.mp3", songs / "copy.mp3", songs / "a.mp3") == 0
    assert len(server.songs) == 1


@pytest.mark.parametrize("status", ["401", "413", "415", "422", "502"])
def test_a_refused_song_is_its_error_and_the_others_go_on(
    songs: Path, out: Path, status: str
) -> None:
    with fake_reports("ok", status, "ok") as server:
        assert report(server, out, songs) == 1
        assert error_codes(out) == [None, f"code_{status}", None]
        assert lines(out)[1]["song"] == str(songs / "b.FLAC")
        assert lines(out)[1]["error"]["message"].startswith("do [this]")
        assert report(server, out, songs) == 0
    assert server.songs[1] == server.songs[3]
    assert len(server.songs) == 4


@pytest.mark.parametrize("status", ["503", "429"])
def test_a_busy_server_is_asked_again_when_it_says(songs: Path, out: Path, status: str) -> None:
    with fake_reports(status, "ok", retry_after="1") as server:
        began = time.monotonic()
        assert report(server, out, songs / "a.mp3") == 0
        assert time.monotonic() - began >= 1
    assert len(server.songs) == 2


def test_a_server_that_is_busy_for_longer_than_the_timeout_is_not_waited_for(
    songs: Path, out: Path
) -> None:
    with fake_reports("429", "ok", retry_after="40000") as server:
        assert report(server, out, songs / "a.mp3") == 1
    assert error_codes(out) == ["code_429"]
    assert len(server.songs) == 1


@pytest.mark.parametrize("act", ["broken", "cut"])
def test_a_connection_that_breaks_is_made_again(songs: Path, out: Path, act: str) -> None:
    with fake_reports(act, act, "ok") as server:
        assert report(server, out, songs / "a.mp3") == 0
    assert len(server.songs) == 3
    assert len(lines(out)) == 1
    assert len(lines(out)[0]["sections"]) == 3


def test_a_connection_that_goes_on_breaking_is_the_song_s_error(songs: Path, out: Path) -> None:
    with fake_reports(*["broken"] * 4, "ok") as server:
        assert report(server, out, songs / "a.mp3", songs / "b.FLAC") == 1
    assert error_codes(out) == ["no_connection", None]


def test_a_server_that_is_not_there_is_told(songs: Path, out: Path) -> None:
    with fake_reports() as server:
        pass
    assert report(server, out, songs / "a.mp3") == 1
    assert error_codes(out) == ["no_connection"]


def test_a_silent_server_is_left_when_the_song_s_time_is_up(songs: Path, out: Path) -> None:
    with fake_reports("silent", "ok") as server:
        assert report(server, out, songs / "a.mp3", songs / "b.FLAC", "--timeout", "0.5") == 1
    assert error_codes(out) == ["timeout", None]
    assert server.num_left == 1


@pytest.mark.parametrize(
    ("act", "code"),
    [("error", "engine_dead"), ("page", "unexpected_answer"), ("nothing", "incomplete_json")],
)
def test_an_answer_without_a_report_is_the_song_s_error(
    songs: Path, out: Path, act: str, code: str
) -> None:
    with fake_reports(act, "ok") as server:
        assert report(server, out, songs / "a.mp3", songs / "b.FLAC") == 1
    assert error_codes(out) == [code, None]


def test_a_failed_section_leaves_the_others_and_shows_in_the_table(
    songs: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_reports("mood_tags") as server:
        assert report(server, out, songs / "a.mp3") == 0
        assert report(server, out, songs / "a.mp3") == 0
    assert len(server.songs) == 1
    assert lines(out)[0]["report"]["mood"]["error"]["code"] == "incomplete_json"
    assert re.search("F# minor +mood +1.500", capsys.readouterr().out)


def test_the_key_comes_from_the_environment(
    songs: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_reports(key="hunter2") as server:
        assert report(server, out, songs / "a.mp3") == 1
        monkeypatch.setenv("ADAPTER_CLIENT_KEY", "hunter2")
        assert report(server, out, songs / "a.mp3") == 0
    assert error_codes(out) == ["code_401", None]
    assert "ADAPTER_CLIENT_KEY" in lines(out)[0]["error"]["message"]


def test_a_file_that_cannot_be_read_is_its_error(songs: Path, out: Path) -> None:
    with fake_reports() as server:
        assert report(server, out, "/proc/self/mem", songs / "a.mp3") == 1
    assert error_codes(out) == ["unreadable_file", None]


def test_so_many_songs_are_asked_for_at_once(songs: Path, out: Path) -> None:
    with fake_reports("silent") as server:
        assert report(server, out, songs, "--parallel", "2", "--timeout", "0.5") == 1
        assert len(server.songs) == 3
    began = [request["at"] for request in server.requests]
    assert began[1] - began[0] < 0.3 < began[2] - began[0]


def test_the_table_shows_songs_and_sums_and_obeys_no_code_in_them(
    songs: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (songs / "a.mp3").rename(songs / "[bold]\x1b[2J.mp3")
    with fake_reports("ok", "415", "ok") as server:
        report(server, out, songs)
    captured = capsys.readouterr()
    rows = [re.split(" {2,}", row.strip()) for row in captured.out.splitlines()]
    song = [f"{songs}/[bold]\ufffd[2J.mp3", "1:01", "dub [red]techno\ufffd[31m", "124", "F# minor"]
    assert [*song, "1.500", "$0.750000"] in rows
    assert [str(songs / "b.FLAC"), "code_415"] in rows
    assert ["3 songs, 1 failed", "2:02", "0", "3.000", "$1.500000"] in rows
    assert f"{songs / 'b.FLAC'}: code_415: do [this]" in captured.err
    assert f"{songs}/[bold]\ufffd[2J.mp3: 3 sections, 1.500 s, $0.750000" in captured.err
    assert "\x1b" not in captured.out + captured.err


def test_one_song_is_a_song(songs: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_reports("ok") as server:
        report(server, out, songs / "a.mp3")
    assert "1 song, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.mp3"], "'nowhere.mp3': expected a file, a directory or an http(s) URL"),
        (["{empty}"], "there are no audio files in this directory"),
        ([URL, "--server", "localhost:8000"], "expected a URL such as http://127.0.0.1:8000"),
        ([URL, "--out", "{empty}"], "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert told in refusal(capsys, *(one.format(empty=tmp_path) for one in arguments))


def test_a_section_that_the_server_does_not_have_is_refused(
    songs: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_reports() as server:
        assert report(server, out, songs, "--sections", "mood_tag") == 1
    assert "--sections mood_tag: the server has catalog_metadata, mood" in capsys.readouterr().err
    assert server.songs == []


def test_ctrl_c_gives_the_song_in_flight_up_and_keeps_the_others(songs: Path, out: Path) -> None:
    with fake_reports("ok", "silent", "ok") as server:
        process = started(server, out, songs)
        assert server.answering.wait(timeout=30)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=10)
        assert process.returncode == 130
        assert f"stopped; the same command goes on with {out}" in said
        assert "Traceback" not in said
        assert error_codes(out) == [None]
        assert report(server, out, songs) == 0
    assert server.num_left == 1
    assert len(server.songs) == 4
    assert len(lines(out)) == 3


def test_after_a_kill_only_what_is_missing_is_asked(songs: Path, out: Path) -> None:
    with fake_reports("ok", "silent", "ok") as server:
        process = started(server, out, songs)
        assert server.answering.wait(timeout=30)
        process.kill()
        process.communicate(timeout=10)
        assert report(server, out, songs) == 0
    assert server.songs[1] == server.songs[2]
    assert len(server.songs) == 4
    assert error_codes(out) == [None, None, None]


def test_on_a_terminal_bars_show_the_sections_as_they_come(songs: Path, out: Path) -> None:
    ours, theirs = os.openpty()
    with fake_reports("ok", "silent") as server:
        process = started(server, out, songs, stderr=theirs, TERM="xterm", COLUMNS="120")
        os.close(theirs)
        shown = b""
        deadline = time.monotonic() + 10
        while not BARS.search(CODES.sub(b"", shown)) and time.monotonic() < deadline:
            shown += os.read(ours, 4096)  # ten times a second there is something
        process.terminate()
        process.communicate(timeout=10)
        os.close(ours)
    assert BARS.search(CODES.sub(b"", shown))


def test_two_runs_do_not_share_a_file(songs: Path, out: Path) -> None:
    with fake_reports("silent") as server:
        process = started(server, out, songs)
        assert server.answering.wait(timeout=30)
        assert report(server, out, songs) == 1
        process.terminate()
        process.communicate(timeout=10)
        assert process.returncode == 128 + signal.SIGTERM
    assert len(server.songs) == 1
