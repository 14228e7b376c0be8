"""The usage log: what is durable, and what happens where the disk fails."""

import asyncio
import dataclasses
import json
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from adapter import usage
from adapter.errors import SettingsError
from adapter.usage import COLUMNS, MIGRATIONS, UsageLog, UsageRecord, timestamp
from tests.usage_writer import record

ROOT = Path(__file__).parents[1]
WRITER = [sys.executable, str(Path(__file__).with_name("usage_writer.py"))]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.sqlite3"


@contextmanager
def opened(path: Path | str | None, retention_days: int | None = None) -> Iterator[UsageLog]:
    log = UsageLog.open(path, retention_days=retention_days)
    try:
        yield log
    finally:
        log.close()


def stored(path: Path, columns: Sequence[str] = ("request_id",)) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return connection.execute(f"SELECT {', '.join(columns)} FROM usage ORDER BY id").fetchall()


def refusal(path: Path | str) -> str:
    with pytest.raises(SettingsError) as caught:
        UsageLog.open(path)
    message = str(caught.value)
    assert message.startswith(f"ADAPTER_USAGE_DB='{path}': expected ")
    assert "\n" not in message
    return message


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another program holds the database's write lock."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


async def until(log: UsageLog, status: str) -> None:
    async with asyncio.timeout(10):
        while log.status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# What a record holds.


async def test_a_record_comes_back_with_every_field(path: Path) -> None:
    finished_at = datetime(2026, 1, 31, 23, 59, 59, 123456, tzinfo=UTC)
    written = record("a", key_name=None, revision=None, finished_at=finished_at)
    with opened(path) as log:
        await log.write([written])
        assert log.status == "ok"
        (row,) = stored(path, COLUMNS)
    assert row == (*dataclasses.astuple(written)[:-1], "2026-01-31T23:59:59.123456Z")


async def test_a_record_written_twice_is_stored_once_as_it_came_first(path: Path) -> None:
    with opened(path) as log:
        await log.write([record("a", outcome="stop"), record("b")])
        await log.write([record("a", outcome="length"), record("c")])
    assert stored(path, ["request_id", "outcome"]) == [("a", "stop"), ("b", "stop"), ("c", "stop")]


async def test_stored_records_cannot_be_changed(path: Path) -> None:
    with opened(path) as log:
        await log.write([record("a")])
    append_only = pytest.raises(sqlite3.IntegrityError, match="append-only")
    with closing(sqlite3.connect(path)) as connection, append_only:
        connection.execute("UPDATE usage SET cost_usd = 0")


async def test_a_record_that_sqlite_would_refuse_holds_nothing_up(path: Path) -> None:
    with opened(path) as log:
        await log.write([record("a", model="\udcff", elapsed_seconds=float("nan")), record("b")])
        assert log.status == "ok"
    assert stored(path, ["request_id", "model", "elapsed_seconds"])[0] == ("a", "?", None)


# When it is durable.


async def test_what_was_written_is_in_the_file_when_write_returns(path: Path) -> None:
    with opened(path) as log:
        for number in range(5):
            await log.write([record(f"{number}")])
            assert len(stored(path)) == number + 1


async def test_writers_at_the_same_time_share_commits(path: Path) -> None:
    with opened(path) as log:
        await asyncio.gather(*[log.write([record(f"{number}")]) for number in range(500)])
        store = log._store
        assert store is not None and store._connection is not None
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert len(stored(path)) == 500


async def test_a_caller_that_is_cancelled_leaves_its_record_behind(path: Path) -> None:
    with opened(path) as log:
        task = asyncio.create_task(log.write([record("a")]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert stored(path) == [("a",)]


def test_closing_stores_what_waits_and_frees_the_file(path: Path) -> None:
    async def write_without_waiting(log: UsageLog) -> None:
        writes = [asyncio.create_task(log.write([record(f"{n}")])) for n in range(3000)]
        await asyncio.sleep(0)
        assert len(writes) == 3000

    log = UsageLog.open(path)
    with pytest.raises(asyncio.CancelledError):  # the loop ends before its tasks do
        asyncio.run(_cancelled_after(write_without_waiting(log)))
    log.close()
    log.close()
    assert len(stored(path)) == 3000
    assert not path.with_name(path.name + "-wal").exists()
    UsageLog.open(path).close()


async def _cancelled_after(work: "asyncio._CoroutineLike[None]") -> None:
    await work
    raise asyncio.CancelledError


async def test_a_record_that_comes_after_closing_is_counted_and_logged(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = UsageLog.open(path)
    log.close()
    await log.write([record("late"), record("later")])
    assert (log.num_dropped, log.status) == (2, "failing")
    assert "closed" in caplog.text


def test_kill_9_at_any_moment_loses_no_record_whose_write_returned(path: Path) -> None:
    moments = random.Random(1)
    acknowledged: set[str] = set()
    for turn in range(20):
        acknowledged |= _ids_until_killed(path, after_seconds=moments.uniform(0.0, 0.2), turn=turn)
        if path.exists():
            assert acknowledged <= _request_ids(path)
    assert len(acknowledged) > 500
    UsageLog.open(path).close()


def _ids_until_killed(path: Path, *, after_seconds: float, turn: int) -> set[str]:
    """Kill a writing process; two turns of three once it has stored something."""
    process = subprocess.Popen([*WRITER, "forever", path], env=ENVIRON, stdout=subprocess.PIPE)
    assert process.stdout is not None
    first = b"" if turn % 3 == 0 else process.stdout.readline()
    time.sleep(after_seconds)
    process.send_signal(signal.SIGKILL)
    output = first + process.stdout.read()
    process.wait()
    whole_lines = output[: output.rfind(b"\n") + 1]
    return set(whole_lines.decode().split())


def _request_ids(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        if connection.execute("PRAGMA user_version").fetchone() == (0,):
            return set()  # killed before the table was there
        return {request_id for (request_id,) in connection.execute("SELECT request_id FROM usage")}


# Where the disk fails.


@pytest.mark.parametrize("kind", ["tmpfs", "file_size"])
def test_a_full_disk_costs_no_answer_and_with_room_again_no_record(
    tmp_path: Path, kind: str
) -> None:
    command = [*WRITER, "full", kind, tmp_path]
    if kind == "tmpfs":  # in a mount namespace of its own, which ends with it
        unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "-r"]
        if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
            pytest.skip("this container may not mount a small disk; a limit on files stands for it")
        command = [*unshare, *command]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["status_when_full"] == seen["status_while_full"] == "failing"
    assert seen["status_with_room"] == "ok"
    assert (seen["stored"], seen["dropped"]) == (seen["written"], 0)
    assert seen["written"] > 120
    assert seen["slowest_seconds"] < 1
    assert done.stderr.count("failing:") == 1


async def test_while_failing_nobody_waits_and_the_first_records_are_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage, "_BUSY_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(usage, "MAX_PENDING_RECORDS", 10)
    monkeypatch.setattr(usage, "RETRY_SECONDS", 0.02)
    with opened(path) as log:
        with locked(path):
            for number in range(30):
                await log.write([record(f"{number}")])
            assert (log.status, log.num_dropped) == ("failing", 20)
        await until(log, "ok")
        await log.write([record("last")])
    assert stored(path) == [*[(f"{number}",) for number in range(10)], ("last",)]
    messages = [entry.message for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert [message.split(":")[1] for message in messages] == [
        " failing",
        " records are lost from here on",
        " works again; all that waited is stored, 20 records are lost",
    ]


async def test_the_status_is_ok_again_only_when_all_that_waited_is_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_BUSY_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(usage, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(usage, "_COMMIT_RECORDS", 1)
    with opened(path) as log:
        with locked(path):
            await log.write([record(f"{number}") for number in range(300)])
            assert log.status == "failing"
        await until(log, "ok")
        assert len(stored(path)) == 300


async def test_a_disk_that_hangs_holds_an_answer_for_a_limited_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "COMMIT_TIMEOUT_SECONDS", 0.1)
    with opened(path) as log:
        with locked(path):
            begun_at = time.monotonic()
            await log.write([record("a")])
            assert time.monotonic() - begun_at < 1
            assert log.status == "failing"
        await until(log, "ok")
        assert stored(path) == [("a",)]


async def test_the_event_loop_runs_on_while_the_disk_is_slow(path: Path) -> None:
    with opened(path) as log:
        with locked(path):
            write = asyncio.create_task(log.write([record("a")]))
            gaps, seen_at = [], time.monotonic()
            while len(gaps) < 200:
                await asyncio.sleep(0.001)
                gaps.append(time.monotonic() - seen_at)
                seen_at = time.monotonic()
            assert not write.done()
        await write
    assert sorted(gaps)[len(gaps) // 2] < 0.01
    assert stored(path) == [("a",)]


async def test_a_log_that_is_moved_away_is_started_anew_and_the_moved_one_is_whole(
    path: Path,
) -> None:
    moved = path.with_name("january.sqlite3")

    def move() -> None:
        path.rename(moved)

    with opened(path) as log:
        await log.write([record("a")])
        move()
        await log.write([record("b")])
        assert log.status == "ok"
    assert stored(path) == [("b",)]
    assert stored(moved) == [("a",)]


# What it refuses to open.


def test_a_path_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    assert "No such file or directory" in refusal(tmp_path / "missing" / "usage.sqlite3")
    assert "unable to open" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("not a database, but long enough to look at " * 50)
    assert "not a database" in refusal(tmp_path / "notes.txt")


def test_another_program_s_database_is_refused_and_left_as_it_was(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE experiments (id)")
    before = path.read_bytes()
    assert "another program's database" in refusal(path)
    assert path.read_bytes() == before


def test_a_log_of_a_newer_version_is_refused(path: Path) -> None:
    UsageLog.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    assert "a newer version" in refusal(path)


async def test_an_older_log_is_brought_to_the_present_schema(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as log:
        await log.write([record("a")])
    added = "ALTER TABLE usage ADD COLUMN region TEXT DEFAULT 'eu';"
    monkeypatch.setattr(usage, "MIGRATIONS", (*MIGRATIONS, added))
    with opened(path) as log:
        await log.write([record("b")])
    with opened(path):
        assert stored(path, ["request_id", "region"]) == [("a", "eu"), ("b", "eu")]


def test_a_second_server_is_refused_until_the_first_is_gone(path: Path) -> None:
    process = subprocess.Popen([*WRITER, "forever", path], env=ENVIRON, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert f"another server holds it (process {process.pid} on " in refusal(path)
    process.kill()
    process.stdout.read()
    process.wait()
    UsageLog.open(path).close()


def test_a_forked_child_of_a_killed_server_does_not_hold_its_log(path: Path) -> None:
    process = subprocess.Popen([*WRITER, "fork", path], env=ENVIRON, stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert "another server holds it" in refusal(path)
    process.kill()
    process.wait()
    try:
        UsageLog.open(path).close()
    finally:
        os.kill(child, signal.SIGKILL)


# What it forgets.


async def test_records_older_than_the_retention_are_deleted_at_the_start(path: Path) -> None:
    now = datetime.now(UTC)
    ages = [timedelta(days=days) for days in (0, 29, 31, 400)]
    old = [record(f"old-{n}", finished_at=now - timedelta(days=31)) for n in range(1200)]
    with opened(path) as log:
        await log.write([record(str(age.days), finished_at=now - age) for age in ages])
        await log.write(old)
    with opened(path, retention_days=30):
        for _ in range(200):
            if len(stored(path)) == 2:
                break
            await asyncio.sleep(0.02)
    assert stored(path) == [("0",), ("29",)]


async def test_old_records_are_deleted_again_after_a_day(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_DAY_SECONDS", 0.05)
    long_ago = datetime.now(UTC) - timedelta(days=31)
    with opened(path, retention_days=30) as log:
        await asyncio.sleep(0.1)  # the start's own deletion is over
        await log.write([record("a", finished_at=long_ago)])
        async with asyncio.timeout(5):
            while stored(path):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_without_a_retention_nothing_is_deleted(path: Path) -> None:
    with opened(path) as log:
        await log.write([record("a", finished_at=datetime(1990, 1, 1, tzinfo=UTC))])
    with opened(path) as log:
        await log.write([record("b")])
    assert stored(path) == [("a",), ("b",)]


# Where there is none.


def test_no_path_gives_a_log_that_is_off_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(None) as log:
        asyncio.run(log.write([record("a")]))
        assert (log.status, log.num_dropped) == ("off", 0)
    assert list(tmp_path.iterdir()) == []


def test_timestamps_sort_as_moments_do() -> None:
    moments = [
        datetime(2026, 1, 1, tzinfo=UTC),
        datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
        datetime.fromisoformat("2026-01-01T01:30:00+01:00"),
    ]
    texts = [timestamp(moment) for moment in moments]
    assert texts[0] == "2026-01-01T00:00:00.000000Z"
    assert sorted(texts) == [timestamp(moment) for moment in sorted(moments)]


def test_a_record_s_columns_are_the_table_s(path: Path) -> None:
    UsageLog.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        names = [row[1] for row in connection.execute("PRAGMA table_info(usage)")]
    assert names == ["id", *(column.name for column in dataclasses.fields(UsageRecord))]
