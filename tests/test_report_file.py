"""The reports' file: torn lines, what counts as the same question, one writer at a time."""

import json
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adapter.errors import SettingsError
from adapter.report_file import open_report_file
from adapter.report_record import Question, error_record
from tests.report_writer import record

WHOLE = (json.dumps(record("aa")) + "\n").encode()
TORN = json.dumps(record("bb", lyrics="la la")).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "reports.jsonl"


def answered(path: Path) -> set[str]:
    """The SHA-256 of each song that the file has a report of."""
    with open_report_file(path) as file:
        return {question.song for question in file.answered}


def refusal(path: Path) -> str:
    before = path.read_bytes()
    with pytest.raises(SettingsError) as refused, open_report_file(path):
        pass
    assert path.read_bytes() == before
    return str(refused.value)


def test_a_line_is_there_as_soon_as_it_is_written(path: Path) -> None:
    with open_report_file(path) as file:
        file.append(record("aa"))
        assert json.loads(path.read_bytes())["sha256"] == "aa"


def test_the_next_run_knows_the_lines_of_the_one_before(path: Path) -> None:
    for sha256 in ("aa", "bb"):
        with open_report_file(path) as file:
            file.append(record(sha256))
    assert answered(path) == {"aa", "bb"}


@pytest.mark.parametrize("num_bytes", [1, 5, 9, 10, 40, len(TORN) - 1])
def test_a_line_that_was_torn_is_cut_off_and_the_others_stand(path: Path, num_bytes: int) -> None:
    path.write_bytes(WHOLE + TORN[:num_bytes])
    assert answered(path) == {"aa"}
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize("zeros", [b"\0" * 4096, TORN[:40] + b"\0" * 100])
def test_the_zeros_that_a_power_cut_leaves_are_cut_off(path: Path, zeros: bytes) -> None:
    path.write_bytes(WHOLE + zeros)
    assert answered(path) == {"aa"}
    assert path.read_bytes() == WHOLE


def test_a_line_that_lacks_only_its_end_is_kept(path: Path) -> None:
    path.write_bytes(WHOLE + TORN)
    assert answered(path) == {"aa", "bb"}
    assert path.read_bytes() == WHOLE + TORN + b"\n"


def test_a_line_behind_a_torn_one_is_whole(path: Path) -> None:
    path.write_bytes(WHOLE + TORN[:50])
    with open_report_file(path) as file:
        file.append(record("cc"))
    assert [json.loads(line)["sha256"] for line in path.open()] == ["aa", "cc"]


@pytest.mark.parametrize(
    ("content", "number"),
    [
        (b"shopping: milk\n", 1),
        (b"shopping: milk", 1),
        (WHOLE + b"[1, 2]\n", 2),
        (WHOLE + b'{"song": "a.mp3"}\n', 2),
        (WHOLE + TORN[:50] + b"\n" + WHOLE, 2),
        (b"ID3\x04\x00\x00\x00" + bytes(64), 1),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(
    path: Path, content: bytes, number: int
) -> None:
    path.write_bytes(content)
    assert f"line {number} is no report" in refusal(path)


def test_empty_lines_do_no_harm(path: Path) -> None:
    path.write_bytes(WHOLE + b"\n" + WHOLE)
    assert answered(path) == {"aa"}


def test_a_song_that_failed_is_not_answered(path: Path) -> None:
    with open_report_file(path) as file:
        file.append(error_record("a.mp3", {"code": "not_audio", "message": "", "field": None}))
        assert file.answered == {}
    assert answered(path) == set()


def test_other_sections_are_another_question_in_whatever_order(path: Path) -> None:
    with open_report_file(path) as file:
        file.append(record("aa", sections=["mood_tags", "catalog_metadata"]))
    with open_report_file(path) as file:
        assert Question.of("aa", ["catalog_metadata", "mood_tags"]) in file.answered
        assert Question.of("aa", ["mood_tags"]) not in file.answered
        assert Question.of("aa", None) not in file.answered


def test_another_writer_is_refused_until_the_first_has_ended(path: Path) -> None:
    with open_report_file(path) as file:
        file.append(record("aa"))
        assert "another process writes its reports there" in refusal(path)
    assert answered(path) == {"aa"}


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none" / "reports.jsonl", Path("/dev/null")):
        with pytest.raises(SettingsError, match=f"--out {place}"), open_report_file(place):
            pass


def test_a_line_that_finds_no_room_is_taken_back(path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path.write_bytes(WHOLE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(WHOLE) + 100, before[1]))
        with open_report_file(path) as file, pytest.raises(SettingsError, match="make room"):
            file.append(record("bb", lyrics="la" * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_bytes() == WHOLE


def test_whenever_a_writer_is_killed_every_line_that_it_had_written_is_there(path: Path) -> None:
    random.seed(7)
    num_said = 0
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.report_writer", str(path)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        said = [writer.stdout.readline()]  # it is at work
        time.sleep(random.uniform(0, 0.05))
        writer.kill()
        said += writer.stdout.read().splitlines()
        writer.wait()
        num_said += len(said)
        songs = answered(path)
        # The one that was in flight may be there without having been said.
        assert {str(number) for number in range(num_said)} <= songs
        assert len(songs) <= num_said + 1
        num_said = len(songs)
