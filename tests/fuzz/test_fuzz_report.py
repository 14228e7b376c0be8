"""`make fuzz` fails where it should."""

from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.__main__ import Report
from tests.fuzz.traffic import Request, Tally


@pytest.mark.parametrize(
    ("report", "passed"),
    [
        (Report(memory_bytes=[500, 800, 1000, 1200, 1049]), True),
        (Report(memory_bytes=[500, 800, 1000, 900]), True),
        (Report(memory_bytes=[500, 800, 1000, 1051]), False),
        (Report(faults=["/generate: status 500"]), False),
        (Report(crashes=["the server ended with -11"]), False),
    ],
)
def test_faults_crashes_and_growth_fail_the_run(report: Report, passed: bool) -> None:
    assert report.passed is passed
    assert str(report).endswith("passed" if passed else "FAILED")


def test_the_report_counts_statuses_by_route() -> None:
    report = Report(Counter({("/generate", "200"): 7, ("/generate", "422"): 3}))
    assert "/generate        200: 7, 422: 3" in str(report)


def test_what_met_a_fault_is_written_so_that_it_can_be_replayed(tmp_path: Path) -> None:
    request = Request("POST", "/generate", ((b"X-A", b"\xff"),), b"\x00\xff")
    tally = Tally()
    tally.note(request, "500", "status 500")
    tally.note(request, "200", None)
    tally.write_faults(tmp_path)
    (file,) = tmp_path.iterdir()
    assert Request.from_json(file.read_text()) == request
