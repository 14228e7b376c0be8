"""`python -m tests.report_writer FILE`: writes long reports until it is killed, and says which."""

import sys
from itertools import count
from pathlib import Path

from adapter.report_file import open_report_file
from adapter.report_record import Record, report_record

LONG = "la " * 300_000


def record(sha256: str, *, lyrics: str = "", sections: list[str] | None = None) -> Record:
    """The line of a file with this SHA-256."""
    answer = {"report": {"lyrics": lyrics}, "sections": [], "elapsed_seconds": 1.0, "cost_usd": 0.1}
    return report_record("song.mp3", sha256, sections, answer)


if __name__ == "__main__":
    with open_report_file(Path(sys.argv[1])) as file:
        for number in count(len(file.answered)):
            file.append(record(str(number), lyrics=LONG))
            print(number, flush=True)
