"""The reports' file: a JSON line for each song, each on the disk before the next song's.

A process that is killed while it writes leaves the beginning of a line, which the next one cuts
off: no other line is ever changed.
"""

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from adapter.errors import SettingsError
from adapter.report_record import Question, Record, Summary, answered_question, summarize

_LINE_START = b'{"song": '


class ReportFile:
    """An open file of reports, which no other process writes; `answered` is what it holds."""

    def __init__(self, path: Path, file: BinaryIO, answered: dict[Question, Summary]) -> None:
        self.path = path
        self.answered = answered
        self._file = file

    def append(self, record: Record) -> None:
        """Write a line, whole and to the disk. Raises SettingsError where that cannot be done."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        descriptor = self._file.fileno()
        num_bytes = os.fstat(descriptor).st_size
        try:
            _write(descriptor, line)
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, num_bytes)
            raise SettingsError(f"--out {self.path}: {error.strerror}; make room") from error
        question = answered_question(record)
        if question is not None:
            self.answered[question] = summarize(record)


@contextmanager
def open_report_file(path: Path) -> Iterator[ReportFile]:
    """Open or make a file of reports and cut off what a killed process left of a line.

    Raises SettingsError where another process writes it, where it cannot be written, and for a file
    of anything else, which is left as it is.
    """
    try:
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise SettingsError(f"--out {path}: cannot be written: {error.strerror}") from error
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise SettingsError(f"--out {path}: expected a file that can be read again")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingsError(
                f"--out {path}: another process writes its reports there; wait for it or name"
                " another file"
            ) from None
        with path.open("rb") as lines:
            answered, num_whole_bytes = _read(path, lines)
        _mend(file.fileno(), num_whole_bytes)
        _keep_name(path)
        yield ReportFile(path, file, answered)


def _read(path: Path, lines: BinaryIO) -> tuple[dict[Question, Summary], int]:
    """What the whole lines hold, and how many bytes they have."""
    answered: dict[Question, Summary] = {}
    num_whole_bytes = 0
    for number, line in enumerate(lines, start=1):
        try:
            record = _parse(line)
            question = answered_question(record) if record is not None else None
        except (ValueError, RecursionError):
            if _is_torn(line):
                break
            raise SettingsError(
                f"--out {path}: line {number} is no report; name another file, or repair it"
            ) from None
        num_whole_bytes += len(line)
        if record is not None and question is not None:
            answered[question] = summarize(record)
    return answered, num_whole_bytes


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.strip():
        return None
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("no JSON object")
    return record


def _is_torn(line: bytes) -> bool:
    """Whether it may be the beginning of one of our lines, or what a power cut left of it."""
    if line.endswith(b"\n"):
        return False
    written = line.rstrip(b"\0")
    return written.startswith(_LINE_START) or _LINE_START.startswith(written)


def _mend(descriptor: int, num_whole_bytes: int) -> None:
    """Cut off what is behind the whole lines, or end the last where only its end is missing."""
    os.ftruncate(descriptor, num_whole_bytes)
    if num_whole_bytes and os.pread(descriptor, 1, num_whole_bytes - 1) != b"\n":
        _write(descriptor, b"\n")
    os.fsync(descriptor)


def _write(descriptor: int, line: bytes) -> None:
    left = memoryview(line)
    while left:
        left = left[os.write(descriptor, left) :]


def _keep_name(path: Path) -> None:
    """A new file's name is on the disk only when its directory is."""
    directory = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
