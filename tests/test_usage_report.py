"""`python -m adapter usage`: totals, exports, and what it says where it can't."""

import asyncio
import csv
import io
import os
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

import pytest

from adapter import usage_report
from adapter.__main__ import main
from adapter.usage import COLUMNS, UsageLog, UsageRecord
from adapter.usage_report import format_totals, open_report, parse_moment
from tests.usage_writer import record

ROOT = Path(__file__).parents[1]


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


RECORDS = [
    record("a", elapsed_seconds=1.5, cost_usd=0.003, finished_at=at("2026-01-30")),
    record("b", elapsed_seconds=2.0, cost_usd=0.004, finished_at=at("2026-01-31")),
    record("c", elapsed_seconds=0.5, cost_usd=0.001, finished_at=at("2026-01-31T23:59:59.999999"),
           outcome="aborted"),
    record("d", elapsed_seconds=4.0, cost_usd=0.008, finished_at=at("2026-02-01"),
           key_name=None, engine="transformers"),
]  # fmt: skip


def write(path: Path, records: Sequence[UsageRecord]) -> None:
    log = UsageLog.open(path)
    asyncio.run(log.write(records))
    log.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "usage.sqlite3", RECORDS)
    return tmp_path / "usage.sqlite3"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[list[str]]:
    """The words of each line that the command prints."""
    assert main(["usage", *map(str, arguments)]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that the command ends with."""
    assert main(["usage", *map(str, arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_totals_stand_by_key_outcome_and_day(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, "--db", path)
    assert [" ".join(words) for words in lines] == [
        "key outcome day prompts prompt_tokens completion_tokens seconds usd",
        "(none) stop 2026-02-01 1 6033 64 4.000000 0.008000000",
        "studio aborted 2026-01-31 1 6033 64 0.500000 0.001000000",
        "studio stop 2026-01-30 1 6033 64 1.500000 0.003000000",
        "studio stop 2026-01-31 1 6033 64 2.000000 0.004000000",
        "total 4 24132 256 8.000000 0.016000000",
    ]


def test_totals_by_one_thing_have_a_line_for_each(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, "--db", path, "--by", "engine")
    assert [line[:2] for line in lines[1:]] == [
        ["transformers", "1"],
        ["vllm", "3"],
        ["total", "4"],
    ]


def test_since_is_within_the_span_and_until_is_not(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    january_31 = ["--db", path, "--since", "2026-01-31", "--until", "2026-02-01", "--by", "day"]
    assert [line[:2] for line in printed(capsys, *january_31)[1:-1]] == [["2026-01-31", "2"]]
    moment = ["--db", path, "--since", "2026-02-01T01:00+01:00", "--by", "day"]
    assert [line[:2] for line in printed(capsys, *moment)[1:-1]] == [["2026-02-01", "1"]]


def test_a_span_without_records_has_totals_of_zero(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, "--db", path, "--since", "2030-01-01")
    assert lines[1:] == [["total", "0", "0", "0", "0.000000", "0.000000000"]]


def test_sums_of_seconds_and_dollars_are_exact_to_the_last_digit(tmp_path: Path) -> None:
    values = [1e9, 1e-7, 0.1, 1.2345678, -1e9 + 0.3] * 200 + [1e-12]
    path = tmp_path / "usage.sqlite3"
    write(path, [record(f"{n}", elapsed_seconds=x, cost_usd=x) for n, x in enumerate(values)])
    with open_report(path) as report:
        (total,) = report.totals(["key"])
    assert total.elapsed_seconds == total.cost_usd == float(sum(map(Fraction, values)))


def test_the_csv_holds_every_record_whole(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_report, "_PAGE_RECORDS", 3)
    assert main(["usage", "--db", str(path), "--csv", "-"]) == 0
    header, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert tuple(header) == COLUMNS
    assert [row[0] for row in rows] == ["a", "b", "c", "d"]
    last = dict(zip(header, rows[-1], strict=True))
    assert (last["key_name"], last["engine"]) == ("", "transformers")
    assert float(last["gpu_usd_per_second"]) == 0.000583
    assert last["finished_at"] == "2026-02-01T00:00:00.000000Z"


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@a", "=HYPERLINK(A1)"])
def test_what_a_client_chose_is_no_formula_of_a_spreadsheet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write(tmp_path / "usage.sqlite3", [replace(record("a"), http_request_id=name)])
    assert main(["usage", "--db", str(tmp_path / "usage.sqlite3"), "--csv", "-"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row["http_request_id"] == "'" + name


def test_the_csv_goes_to_a_file_and_keeps_to_the_span(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "february.csv"
    lines = printed(capsys, "--db", path, "--since", "2026-02-01", "--csv", target)
    assert lines == [["wrote", f"{target}:", "1", "records"]]
    assert len(target.read_text().splitlines()) == 2


def test_a_reader_that_has_seen_enough_ends_the_export_quietly(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite3"
    write(path, [record(f"{n}") for n in range(3000)])
    command = f"{sys.executable} -m adapter usage --db {path} --csv - | head -n 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("request_id,")
    assert done.stderr == ""


async def test_a_log_is_read_while_a_server_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "usage.sqlite3"
    log = UsageLog.open(path)
    try:
        await log.write([record("a")])
        assert printed(capsys, "--db", path, "--by", "key")[-1][:2] == ["total", "1"]
        with open_report(path) as report:
            records = report.records()
            assert next(records)[0] == "a"
            await log.write([record("b")])
            assert log.status == "ok"
            assert [values[0] for values in records] == ["b"]
    finally:
        log.close()


def test_reading_changes_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    printed(capsys, "--db", path)
    assert path.read_bytes() == before
    with open_report(path) as report, pytest.raises(sqlite3.OperationalError, match="readonly"):
        report._connection.execute("DELETE FROM usage")


def test_a_log_on_a_read_only_disk_can_be_read(path: Path) -> None:
    """In a mount namespace of its own, where the directory is mounted read-only."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "-r"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode != 0:
        pytest.skip("this container may not mount a directory read-only")
    mount = f"mount --bind {path.parent} {path.parent} && mount -o remount,ro,bind {path.parent}"
    command = f"{mount} && {sys.executable} -m adapter usage --db {path} --by key"
    done = subprocess.run(
        [*namespace, "sh", "-c", command], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "total" in done.stdout


def test_the_log_is_the_configured_one_unless_it_is_named(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAPTER_USAGE_DB", str(path))
    assert printed(capsys, "--by", "key")[-1][:2] == ["total", "4"]
    monkeypatch.setenv("ADAPTER_USAGE_DB", "")
    assert "ADAPTER_USAGE_DB is empty: name the usage log with --db" in refusal(capsys)


def test_a_file_that_is_no_log_is_one_line_of_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, text, foreign, empty = (tmp_path / name for name in ("a", "b", "c", "d"))
    text.write_text("not a database, but long enough to look at " * 50)
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE experiments (id)")
    empty.touch()
    assert f"there is no usage log at '{missing}'" in refusal(capsys, "--db", missing)
    assert not missing.exists()
    assert "not a database" in refusal(capsys, "--db", text)
    assert "another program's database" in refusal(capsys, "--db", foreign)
    assert "it is empty" in refusal(capsys, "--db", empty)


def test_a_csv_that_cannot_be_written_is_one_line_of_error(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capsys, "--db", path, "--csv", tmp_path / "missing" / "usage.csv")
    assert message.startswith("error: cannot write ")


@pytest.mark.parametrize(
    "arguments",
    [["--since", "yesterday"], ["--until", "2026-02-30"], ["--by", "song"], ["--by"]],
)
def test_a_bad_argument_ends_with_2(
    path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["usage", "--db", str(path), *arguments])
    assert caught.value.code == 2
    assert f"argument {arguments[0]}" in capsys.readouterr().err


def test_a_moment_without_an_offset_is_utc() -> None:
    assert parse_moment("2026-01-31") == at("2026-01-31")
    assert parse_moment("2026-01-31T18:00Z") == at("2026-01-31T18:00")
    assert parse_moment("2026-01-31T18:00+02:00") == at("2026-01-31T16:00")


def test_the_columns_of_a_table_are_in_line() -> None:
    total = usage_report.Total(("studio",), 1000, 2, 3, 4.0, 5.0)
    assert format_totals(["key"], [total]).splitlines() == [
        "key     prompts  prompt_tokens  completion_tokens   seconds          usd",
        "studio     1000              2                  3  4.000000  5.000000000",
        "total      1000              2                  3  4.000000  5.000000000",
    ]
