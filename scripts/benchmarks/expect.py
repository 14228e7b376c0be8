"""What a run must show: the ratio of two paths' wall seconds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import Row
from benchmarks.workload import SongState

FORM = re.compile(r"([a-z-]+)/([a-z-]+):(new|known)<=([0-9]+\.?[0-9]*)")


@dataclass(frozen=True)
class Expectation:
    """`path` takes at most `most` times the wall seconds of `other` with the song new or known; a
    path that never has it known is compared with its song new."""

    path: str
    other: str
    song_state: SongState
    most: float


@dataclass(frozen=True)
class Verdict:
    """`ratio` is None where a path gave no row, which meets nothing."""

    expectation: Expectation
    ratio: float | None

    @property
    def met(self) -> bool:
        return self.ratio is not None and self.ratio <= self.expectation.most

    def __str__(self) -> str:
        asked = self.expectation
        shown = "not measured" if self.ratio is None else f"{self.ratio:.3f}"
        return (
            f"{asked.path} / {asked.other}, song {asked.song_state}: {shown}, expected at most "
            f"{asked.most:g}: {'met' if self.met else 'NOT MET'}"
        )


def parse_expectation(text: str) -> Expectation:
    """Raises ValueError for what is not `path/path:new<=1.05`."""
    match = FORM.fullmatch(text)
    if not match:
        raise ValueError(text)
    state: SongState = "new" if match[3] == "new" else "known"
    return Expectation(match[1], match[2], state, float(match[4]))


def check_expectations(expectations: Sequence[Expectation], rows: Sequence[Row]) -> list[Verdict]:
    return [Verdict(expected, find_ratio(expected, rows)) for expected in expectations]


def find_ratio(expected: Expectation, rows: Sequence[Row]) -> float | None:
    seconds = {(row.path, row.song_state): row.wall_seconds for row in rows}

    def of(path: str) -> float | None:
        return seconds.get((path, expected.song_state), seconds.get((path, "new")))

    one, other = of(expected.path), of(expected.other)
    return None if one is None or other is None else one / other
