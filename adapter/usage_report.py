"""Totals and exports of the usage log, read while a server writes it."""

import csv
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Context, Decimal
from math import fsum
from pathlib import Path
from typing import TextIO

from adapter.errors import SettingsError
from adapter.usage import COLUMNS, check_schema, timestamp

GROUPS = {
    "key": "coalesce(key_name, '(none)')",
    "outcome": "outcome",
    "day": "substr(finished_at, 1, 10)",
    "model": "model",
    "engine": "engine",
}
"""What totals can be grouped by, with its SQL."""

_HEADER = ("prompts", "prompt_tokens", "completion_tokens", "seconds", "usd")
_PAGE_RECORDS = 10_000
_EXACT = Context(prec=80)  # digits; a sum of seconds and of dollars needs fewer than 40


@dataclass(frozen=True, slots=True)
class Total:
    """The sums over the records of one group."""

    group: tuple[str, ...]
    prompts: int
    prompt_tokens: int
    completion_tokens: int
    elapsed_seconds: float
    cost_usd: float


class _ExactSum:
    """SQLite's own sum loses digits; this one is rounded once, at the end."""

    def __init__(self) -> None:
        self._sum = Decimal(0)

    def step(self, value: float | None) -> None:
        self._sum = _EXACT.add(self._sum, Decimal(value or 0))

    def finalize(self) -> float:
        return float(self._sum)


class UsageReport:
    """The records that finished at `since` or later and before `until`, of an open log."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> None:
        self._connection = connection
        # "~" sorts behind every digit.
        self._span = (timestamp(since) if since else "", timestamp(until) if until else "~")

    def totals(self, by: Sequence[str]) -> list[Total]:
        """One total for each combination of the groups `by`, keys of GROUPS, sorted."""
        groups = [GROUPS[name] for name in by]
        order = ", ".join(str(number + 1) for number in range(len(groups)))
        rows = self._connection.execute(
            f"SELECT {', '.join(groups)}, count(*), "
            "sum(prompt_tokens), sum(completion_tokens), "
            "exact_sum(elapsed_seconds), exact_sum(cost_usd) FROM usage "
            f"WHERE finished_at >= ? AND finished_at < ? GROUP BY {order} ORDER BY {order}",
            self._span,
        )
        return [Total(tuple(map(str, row[:-5])), *row[-5:]) for row in rows]

    def records(self) -> Iterator[tuple[object, ...]]:
        """The records as tuples of COLUMNS, in the order of writing.

        Read in pages: one long read would keep the server from reusing its write-ahead log.
        """
        last_id = 0
        query = (
            f"SELECT id, {', '.join(COLUMNS)} FROM usage "
            "WHERE id > ? AND finished_at >= ? AND finished_at < ? ORDER BY id LIMIT ?"
        )
        while page := self._connection.execute(
            query, (last_id, *self._span, _PAGE_RECORDS)
        ).fetchall():
            yield from (row[1:] for row in page)
            last_id = page[-1][0]


@contextmanager
def open_report(
    path: Path, *, since: datetime | None = None, until: datetime | None = None
) -> Iterator[UsageReport]:
    """Open the log for reading. Raises SettingsError where there is none that can be read."""
    if not path.is_file():
        raise SettingsError(f"there is no usage log at {str(path)!r}: name one with --db")
    try:
        with closing(_connect(path)) as connection:
            if check_schema(connection) == 0:
                raise sqlite3.DatabaseError("it is empty")
            connection.create_aggregate("exact_sum", 1, _ExactSum)  # type: ignore[arg-type]
            yield UsageReport(connection, since, until)
    except sqlite3.Error as error:
        raise SettingsError(f"cannot read the usage log {str(path)!r}: {error}") from error


def parse_moment(text: str) -> datetime:
    """A date or a date and time in ISO 8601; UTC where it has no offset. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def write_csv(report: UsageReport, file: TextIO) -> int:
    """Write every record under a header; returns their number."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    count = 0
    for record in report.records():
        writer.writerow(map(_no_formula, record))
        count += 1
    return count


def _no_formula(value: object) -> object:
    """A text that a spreadsheet would compute gets a quote in front; clients choose some of them.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return "'" + value
    return value


def format_totals(by: Sequence[str], totals: Sequence[Total]) -> str:
    """A table with a line for each total and one for their sum."""
    rows = [(*total.group, *_figures(total)) for total in totals]
    everything = Total(
        group=("total", *[""] * (len(by) - 1)),
        prompts=sum(total.prompts for total in totals),
        prompt_tokens=sum(total.prompt_tokens for total in totals),
        completion_tokens=sum(total.completion_tokens for total in totals),
        elapsed_seconds=fsum(total.elapsed_seconds for total in totals),
        cost_usd=fsum(total.cost_usd for total in totals),
    )
    table = [(*by, *_HEADER), *rows, (*everything.group, *_figures(everything))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(_line(row, widths, num_groups=len(by)) for row in table)


def _figures(total: Total) -> tuple[str, ...]:
    counts = (total.prompts, total.prompt_tokens, total.completion_tokens)
    return (*map(str, counts), f"{total.elapsed_seconds:.6f}", f"{total.cost_usd:.9f}")


def _line(row: Sequence[str], widths: Sequence[int], *, num_groups: int) -> str:
    cells = [
        cell.ljust(width) if column < num_groups else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _connect(path: Path) -> sqlite3.Connection:
    """Read-only. Where SQLite cannot keep its side files and no server does, the file is enough."""
    uri = path.absolute().as_uri() + "?mode=ro"
    connection = sqlite3.connect(uri, uri=True, timeout=5.0)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        wal = Path(f"{path}-wal")
        if wal.exists() and wal.stat().st_size:
            raise
        return sqlite3.connect(uri + "&immutable=1", uri=True)
    return connection
