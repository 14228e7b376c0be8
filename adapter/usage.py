"""The usage log: one durable record for each prompt that was in the engine.

A SQLite database in WAL mode with one writer: a thread that commits together what came while it
was committing. `write` returns when the records are on the disk; where the disk fails it returns
all the same, and the log says so until every record that waited is stored.
"""

import asyncio
import fcntl
import logging
import os
import platform
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Literal

from adapter.errors import SettingsError

logger = logging.getLogger(__name__)

UsageLogStatus = Literal["ok", "failing", "off"]

MAX_PENDING_RECORDS = 20_000  # what waits for a disk that fails: some 6 MB
COMMIT_TIMEOUT_SECONDS = 5.0  # an answer waits no longer for a disk that hangs
RETRY_SECONDS = 1.0
CLOSE_TIMEOUT_SECONDS = 10.0
_BUSY_TIMEOUT_SECONDS = 2.0  # another program's lock on the database; less than the commit's
_COMMIT_RECORDS = 1000
_PURGE_RECORDS = 500  # deleted at once, so that a write waits for milliseconds at most
_DAY_SECONDS = 86_400.0
_HOUR_SECONDS = 3600.0

# Entry n makes version n+1 of the schema (PRAGMA user_version) out of version n. Add; never edit.
# Without NOT NULL: a record that SQLite refuses would hold up all that come after it.
MIGRATIONS = (
    """
    CREATE TABLE usage (
        id INTEGER PRIMARY KEY,
        request_id TEXT NOT NULL UNIQUE,
        http_request_id TEXT,
        key_name TEXT,
        model TEXT,
        revision TEXT,
        engine TEXT,
        prompt_tokens INTEGER,
        completion_tokens INTEGER,
        cached_tokens INTEGER,
        audio_tokens INTEGER,
        elapsed_seconds REAL,
        gpu_usd_per_second REAL,
        cost_usd REAL,
        outcome TEXT,
        finished_at TEXT
    );
    CREATE INDEX usage_finished_at ON usage (finished_at);
    CREATE TRIGGER usage_is_append_only BEFORE UPDATE ON usage
    BEGIN SELECT RAISE(ABORT, 'usage is append-only'); END;
    """,
)


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """What one prompt used. `request_id` names the prompt: its first record is the one kept.

    `outcome` is the answer's finish reason or its error's code ("stop", "aborted", …).
    """

    request_id: str
    http_request_id: str
    key_name: str | None
    model: str
    revision: str | None
    engine: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    audio_tokens: int
    elapsed_seconds: float
    gpu_usd_per_second: float
    cost_usd: float
    outcome: str
    finished_at: datetime = field(default_factory=lambda: datetime.now(UTC))


COLUMNS = tuple(column.name for column in fields(UsageRecord))
_values = attrgetter(*COLUMNS)
_INSERT = (
    f"INSERT INTO usage ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) "
    "ON CONFLICT (request_id) DO NOTHING"
)
_DELETE = (
    "DELETE FROM usage WHERE id IN "
    "(SELECT id FROM usage WHERE finished_at < ? ORDER BY finished_at LIMIT ?)"
)


def timestamp(moment: datetime) -> str:
    """The database's form of a moment: UTC, of one length, so that texts sort as moments do."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class UsageLog:
    """Writes records from any event loop; one per process, since it locks its file.

    While `status` is "ok", every record whose `write` has returned is on the disk. It is "failing"
    from the first failure until all that waited is stored, and "off" where there is no log.
    """

    def __init__(self, store: "_Store | None", retention_days: int | None) -> None:
        self._store = store
        self._retention = timedelta(days=retention_days) if retention_days else None
        self._status: UsageLogStatus = "off" if store is None else "ok"
        self._condition = threading.Condition()  # guards all that follows
        self._pending: deque[UsageRecord] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._num_accepted = 0
        self._num_stored = 0
        self._num_dropped = 0
        self._dropping = False
        self._retry_at = 0.0
        self._purge_at = 0.0 if self._retention else float("inf")
        self._closing = False
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, path: str | Path | None, *, retention_days: int | None = None) -> "UsageLog":
        """Open or create the log at `path` and start its thread; None gives a log that is off.

        Records older than `retention_days` are deleted; None keeps them for ever. Raises
        SettingsError where the path cannot be used or another server has it.
        """
        if path is None:
            return cls(None, None)
        log = cls(_Store.open(Path(path).absolute()), retention_days)
        log._thread = threading.Thread(target=log._run, name="usage-log", daemon=True)
        log._thread.start()
        return log

    @property
    def status(self) -> UsageLogStatus:
        return self._status

    @property
    def num_dropped(self) -> int:
        """The records that found no room while the disk failed, or came after `close`."""
        return self._num_dropped

    def seconds_today(self) -> dict[str, float]:
        """The engine's seconds of each key since midnight UTC; blocks for a query, so ask it
        before anything is written."""
        if self._store is None:
            return {}
        midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return self._store.seconds_by_key(midnight)

    async def write(self, records: Sequence[UsageRecord]) -> None:
        """Return when the records are on the disk, or at once while the log is failing.

        Never raises for the disk's sake. The records are taken before the first suspension: a
        caller that is cancelled here gives up the waiting, not the records.
        """
        if self._store is None or not records:
            return
        stored = self._put(records)
        if stored is None:
            return
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_SECONDS):
                await stored.wait()
        except TimeoutError:
            self._fail(f"the disk has not answered for {COMMIT_TIMEOUT_SECONDS:g} s")

    def close(self) -> None:
        """Store what waits and release the file; blocks for ten seconds at most. May be called
        twice."""
        if self._store is None or self._thread is None:
            return
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(CLOSE_TIMEOUT_SECONDS)
        if self._pending:
            logger.error("usage log: closed with %d records not stored", len(self._pending))
        if not self._thread.is_alive():
            self._store.close()

    def _put(self, records: Sequence[UsageRecord]) -> asyncio.Event | None:
        """Take the records; None where nobody should wait for them."""
        with self._condition:
            room = 0 if self._closing else MAX_PENDING_RECORDS - len(self._pending)
            taken = records[:room]
            self._pending.extend(taken)
            self._num_accepted += len(taken)
            self._condition.notify()
            if len(taken) < len(records):
                self._drop(len(records) - len(taken))
            if self._status == "failing":
                return None
            waiting = _Waiting(self._num_accepted)
            self._waiting.append(waiting)
            return waiting.stored

    def _drop(self, count: int) -> None:
        reason = "it is closed" if self._closing else f"{MAX_PENDING_RECORDS} records wait already"
        self._fail(reason)
        if not self._dropping:
            logger.error("usage log: records are lost from here on: %s", reason)
        self._dropping = True
        self._num_dropped += count

    def _fail(self, reason: object) -> None:
        """From here on nobody waits for the disk."""
        with self._condition:
            if not self._pending and not self._closing:
                return  # stored while the caller was giving up
            if self._status == "ok":
                logger.error("usage log: failing: %s; answers go on, records wait", reason)
            self._status = "failing"
            released, self._waiting = self._waiting, deque()
        _release(released)

    def _run(self) -> None:
        while True:
            batch, closing = self._next_batch()
            progressed = bool(batch) and self._write_batch(batch)
            if closing and not progressed:
                return
            self._purge()

    def _next_batch(self) -> tuple[list[UsageRecord], bool]:
        """Wait for something to do; returns what to store, and whether nothing can come after it.

        The batch stays pending until it is stored.
        """
        with self._condition:
            while (seconds := self._idle_seconds()) > 0:
                self._condition.wait(min(seconds, _HOUR_SECONDS))
            return list(islice(self._pending, _COMMIT_RECORDS)), self._closing

    def _idle_seconds(self) -> float:
        if self._closing:
            return 0.0
        due_at = self._retry_at if self._pending else self._purge_at
        return due_at - time.monotonic()

    def _write_batch(self, batch: Sequence[UsageRecord]) -> bool:
        assert self._store is not None
        try:
            self._store.insert(batch)
        except Exception as error:  # whatever it is: the thread lives, and answers go on
            self._store.disconnect()
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._fail(f"{self._store.path}: {error}")
            return False
        self._stored(len(batch))
        return True

    def _stored(self, count: int) -> None:
        with self._condition:
            for _ in range(count):
                self._pending.popleft()
            self._num_stored += count
            released = []
            while self._waiting and self._waiting[0].last <= self._num_stored:
                released.append(self._waiting.popleft())
            if self._status == "failing" and not self._pending:
                self._status, self._dropping = "ok", False
                logger.warning(
                    "usage log: works again; all that waited is stored, %d records are lost",
                    self._num_dropped,
                )
        _release(released)

    def _purge(self) -> None:
        """Delete some records that are too old; the rest is for the next turn."""
        if self._retention is None or time.monotonic() < self._purge_at:
            return
        assert self._store is not None
        try:
            deleted = self._store.delete_before(datetime.now(UTC) - self._retention, _PURGE_RECORDS)
        except sqlite3.Error as error:
            logger.warning("usage log: cannot delete old records: %s", error)
            self._store.disconnect()
            self._purge_at = time.monotonic() + _HOUR_SECONDS
            return
        if deleted < _PURGE_RECORDS:
            self._purge_at = time.monotonic() + _DAY_SECONDS


class _Waiting:
    """A caller that waits until the record number `last` is stored."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.loop = asyncio.get_running_loop()
        self.stored = asyncio.Event()


def _release(waiting: Iterable[_Waiting]) -> None:
    """Wake the callers, each loop once."""
    for loop, group in groupby(waiting, key=lambda one: one.loop):
        events = [one.stored for one in group]
        with suppress(RuntimeError):  # the loop is closed: nobody waits there
            loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()


class _Store:
    """The database and the lock on it. For one thread at a time."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._connection: sqlite3.Connection | None = None
        self._file_id: tuple[int, int] | None = None

    @classmethod
    def open(cls, path: Path) -> "_Store":
        """Raises SettingsError."""
        try:
            store = cls(path, _lock(path))
            try:
                store._connected()
            except BaseException:
                store.close()
                raise
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise SettingsError(
                f"ADAPTER_USAGE_DB={str(path)!r}: expected a file that this server can write and "
                f"that is its own, or nothing for no log: {reason}"
            ) from error
        return store

    def insert(self, records: Sequence[UsageRecord]) -> None:
        """All of them or none; one that is there stays as it is. Raises sqlite3.Error."""
        connection = self._connected()
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_INSERT, map(_row, records))

    def delete_before(self, moment: datetime, limit: int) -> int:
        """Delete at most `limit` records; returns their number. Raises sqlite3.Error."""
        return self._connected().execute(_DELETE, (timestamp(moment), limit)).rowcount

    def seconds_by_key(self, since: datetime) -> dict[str, float]:
        """Raises sqlite3.Error."""
        query = (
            "SELECT key_name, sum(elapsed_seconds) FROM usage "
            "WHERE finished_at >= ? AND key_name IS NOT NULL GROUP BY key_name"
        )
        return dict(self._connected().execute(query, (timestamp(since),)))

    def disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = None

    def close(self) -> None:
        self.disconnect()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _connected(self) -> sqlite3.Connection:
        """The connection; a new one where the file is another than it was."""
        if self._connection is not None and _file_id(self.path) != self._file_id:
            logger.warning("usage log: %s was moved or removed; starting a new one", self.path)
            # Closing leaves a moved file without what is still in the write-ahead log.
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self.disconnect()
        if self._connection is None:
            self._connection = _connect(self.path)
            self._file_id = _file_id(self.path)
        return self._connection


def _lock(path: Path) -> int:
    """Lock the file beside the database; the lock ends with this process, however that ends.

    Not flock(2): a forked engine would inherit it and hold it after this process was killed.
    """
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 200).decode(errors="replace").strip()
        os.close(descriptor)
        raise OSError(error.errno, f"another server holds it (process {holder})") from error
    with suppress(OSError):  # a full disk: the lock holds without the name
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} on {platform.node()}\n".encode())
    return descriptor


def _connect(path: Path) -> sqlite3.Connection:
    # Transactions are opened by hand, and the writer's thread is not the one that opens the log.
    connection = sqlite3.connect(
        path, timeout=_BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        version = check_schema(connection)
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise sqlite3.OperationalError("its file system cannot hold a SQLite WAL database")
        connection.execute("PRAGMA synchronous = FULL")
        for number, script in enumerate(MIGRATIONS[version:], version + 1):
            connection.executescript(
                f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def check_schema(connection: sqlite3.Connection) -> int:
    """The version of the log's schema, 0 for an empty database. Raises sqlite3.DatabaseError."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if tables and not {"usage", "usage_is_append_only"} <= tables:
        raise sqlite3.DatabaseError("it is another program's database")
    if version > len(MIGRATIONS):
        raise sqlite3.DatabaseError("a newer version of the adapter wrote it")
    return int(version)


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _row(record: UsageRecord) -> tuple[object, ...]:
    *values, finished_at = _values(record)
    return (*map(_storable, values), timestamp(finished_at))


def _storable(value: object) -> object:
    """Lone surrogates, which SQLite refuses, become question marks."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
