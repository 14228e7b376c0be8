"""What a run of `report` shows: bars on a terminal, a line for each song, a table at the end."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from adapter.report_record import Record, Summary, summarize

NAME_CHARACTERS = 40
PLAIN_COLUMNS = 200  # of a table that goes to a file, where nothing says how wide it may be


class Display:
    """Writes to stderr. Bars need a terminal; without one there are the lines alone."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            _Count(),
            TimeElapsedColumn(),
            TextColumn("${task.fields[cost_usd]:.6f}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal or self._console.is_dumb_terminal,
        )

    def note(self, line: str) -> None:
        self._console.print(Text(shown(line, self._console)), soft_wrap=True)

    @contextmanager
    def songs(self, num_songs: int) -> Iterator["SongsLine"]:
        """The bar of all songs, while the block lasts."""
        with self._progress:
            task = self._progress.add_task("all songs", total=num_songs, cost_usd=0.0)
            yield SongsLine(self, self._progress, task)


class SongsLine:
    """The bar of all songs, which makes those of each."""

    def __init__(self, display: Display, progress: Progress, task: TaskID) -> None:
        self._display = display
        self._progress = progress
        self._task = task
        self._cost_usd = 0.0

    @contextmanager
    def song(self, name: str, num_sections: int | None) -> Iterator["SongLine"]:
        """The bar of one song, while the block lasts."""
        console = self._progress.console
        bar = shorten(shown(name, console))
        task = self._progress.add_task(bar, total=num_sections, cost_usd=0.0)
        try:
            yield SongLine(self._display, self._progress, task, name)
        finally:
            self._progress.remove_task(task)

    def end(self, record: Record) -> None:
        """The line that stays of a song."""
        summary = summarize(record)
        self._cost_usd += summary.cost_usd
        self._progress.update(self._task, advance=1, cost_usd=self._cost_usd)
        self._display.note(f"{summary.song}: {_outcome(summary)}")


class SongLine:
    """The bar of one song: a Watcher."""

    def __init__(self, display: Display, progress: Progress, task: TaskID, name: str) -> None:
        self._display = display
        self._progress = progress
        self._task = task
        self._name = name

    def begin(self) -> None:
        self.answered([])

    def answered(self, sections: Sequence[Record]) -> None:
        cost_usd = sum(float(section["cost_usd"]) for section in sections)
        self._progress.update(self._task, completed=len(sections), cost_usd=cost_usd)

    def wait(self, seconds: float, reason: str) -> None:
        self._display.note(f"{self._name}: {reason}; asking again in {seconds:g} s")


class _Count(ProgressColumn):
    """Done of all, where it is known how many there are."""

    def render(self, task: Task) -> Text:
        total = "?" if task.total is None else f"{task.total:g}"
        return Text(f"{task.completed:g}/{total}")


def print_table(summaries: Sequence[Summary]) -> None:
    """The songs and their sums, to stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_COLUMNS
    table = Table(show_footer=True, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title, footer in _sums(summaries).items():
        folds = title in ("song", "genre", "failed")
        least = 12 if title == "song" else None
        justify: Literal["left", "right"] = "left" if folds or title == "key" else "right"
        table.add_column(
            title,
            footer,
            justify=justify,
            no_wrap=not folds,
            overflow="fold",
            min_width=least,
        )
    for summary in summaries:
        table.add_row(*(Text(shown(cell, console)) for cell in _cells(summary)))
    console.print(table)


def shown(text: str, console: Console) -> str:
    """A text that a terminal only shows: file names and a model's words may hold anything."""
    printable = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return printable.encode(console.encoding, "replace").decode(console.encoding)


def shorten(name: str) -> str:
    """The end of a name says more than its beginning."""
    return name if len(name) <= NAME_CHARACTERS else "…" + name[1 - NAME_CHARACTERS :]


def _outcome(summary: Summary) -> str:
    if summary.error is not None:
        return summary.error
    sections = _count(summary.num_sections, "section")
    if summary.failed_sections:
        sections += f", failed: {', '.join(summary.failed_sections)}"
    return f"{sections}, {summary.elapsed_seconds:.3f} s, ${summary.cost_usd:.6f}"


def _sums(summaries: Sequence[Summary]) -> Mapping[str, str]:
    """The columns and what stands under them."""
    num_failed = sum(len(one.failed_sections) for one in summaries)
    num_errors = sum(one.error is not None for one in summaries)
    return {
        "song": f"{_count(len(summaries), 'song')}, {num_errors} failed",
        "length": _minutes(sum(one.duration_seconds or 0.0 for one in summaries)),
        "genre": "",
        "bpm": "",
        "key": "",
        "failed": str(num_failed),
        "seconds": f"{sum(one.elapsed_seconds for one in summaries):.3f}",
        "cost": f"${sum(one.cost_usd for one in summaries):.6f}",
    }


def _cells(summary: Summary) -> tuple[str, ...]:
    if summary.error is not None:
        # Its line has said more of it.
        return (summary.song, "", "", "", "", summary.error.partition(":")[0], "", "")
    return (
        summary.song,
        "" if summary.duration_seconds is None else _minutes(summary.duration_seconds),
        summary.genre,
        summary.bpm,
        summary.key,
        " ".join(summary.failed_sections),
        f"{summary.elapsed_seconds:.3f}",
        f"${summary.cost_usd:.6f}",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
