"""`python -m adapter report`: the reports of many songs, in a file that a next run goes on with."""

import argparse
import asyncio
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType

from adapter.errors import SettingsError
from adapter.report_client import Options, ReportClient, SongError, Watcher, open_session
from adapter.report_display import Display, SongsLine, print_table
from adapter.report_file import ReportFile, open_report_file
from adapter.report_record import Question, Record, Summary, error_record, summarize
from adapter.report_server import Server, started_server
from adapter.report_songs import Song, digest, find_songs
from adapter.settings import load_client_key

EXIT_CTRL_C = 128 + signal.SIGINT


@dataclass(frozen=True, slots=True)
class Asked:
    """A song of this run; `question` is None where its file cannot be read."""

    song: Song
    question: Question | None


def report(args: argparse.Namespace) -> int:
    """Returns the exit code: 0 where all songs are in the file, 1 where some are not, 130 after
    Ctrl-C. Raises SettingsError for what stops the run."""
    given = None if args.server is None else _given_server(args.server)
    options = Options(args.sections, args.seed, args.group_size, args.timeout)
    songs = find_songs(args.songs)
    display = Display()
    with _ended_by_sigterm(), open_report_file(args.out) as file:
        try:
            asked = [Asked(song, _question(song, options.sections)) for song in songs]
            run = Run(file, display, options, asked)
            run.ask(given, args.parallel)
        except KeyboardInterrupt:
            display.note(f"stopped; the same command goes on with {file.path}")
            return EXIT_CTRL_C
    print_table(run.summaries)
    return 1 if any(summary.error is not None for summary in run.summaries) else 0


class Run:
    """The songs of a run, each question once whatever names its song has, and what came of them."""

    def __init__(
        self, file: ReportFile, display: Display, options: Options, asked: Sequence[Asked]
    ) -> None:
        self._file = file
        self._display = display
        self._options = options
        self._asked = _each_once(asked)
        self._summaries: dict[Asked, Summary] = {}

    @property
    def summaries(self) -> list[Summary]:
        return [self._summaries[one] for one in self._asked]

    def ask(self, given: Server | None, num_parallel: int) -> None:
        """Ask for what is not in the file, the given server or one that is started for it."""
        for one in self._asked:
            if one.question in self._file.answered:
                self._summaries[one] = self._file.answered[one.question]
        missing = [one for one in self._asked if one not in self._summaries]
        if self._summaries:
            counts = f"{len(self._summaries)} of {len(self._asked)}"
            self._display.note(f"{counts} songs are in {self._file.path} and not asked again")
        if not missing:
            return
        with nullcontext(given) if given else started_server(self._display.note) as server:
            with self._display.songs(len(missing)) as line:
                asyncio.run(self._ask_all(missing, server, line, num_parallel))
            server.check()

    async def _ask_all(
        self, missing: Sequence[Asked], server: Server, line: SongsLine, num_parallel: int
    ) -> None:
        async with open_session(server.key) as session:
            client = ReportClient(session, server.url, self._options)
            num_sections = _num_sections(self._options.sections, await client.preset_names())
            waiting = iter(missing)

            async def ask_one_by_one() -> None:
                for one in waiting:
                    server.check()
                    with line.song(one.song.name, num_sections) as watcher:
                        record = await _ask(client, one.song, watcher)
                    self._file.append(record)
                    self._summaries[one] = summarize(record)
                    line.end(record)

            await asyncio.gather(*(ask_one_by_one() for _ in range(num_parallel)))


def _each_once(asked: Sequence[Asked]) -> list[Asked]:
    once: dict[Question | Song, Asked] = {}
    for one in asked:
        once.setdefault(one.question or one.song, one)
    return list(once.values())


async def _ask(client: ReportClient, song: Song, watcher: Watcher) -> Record:
    try:
        return await client.ask(song, watcher)
    except SongError as error:
        return error_record(song.name, error.fields())


def _num_sections(sections: Sequence[str] | None, names: Sequence[str] | None) -> int | None:
    """How many sections a report has; None where the server does not tell its presets. Raises
    SettingsError for a section that it does not have."""
    if sections is None:
        return None if names is None else len(names)
    unknown = [] if names is None else [name for name in sections if name not in names]
    if names and unknown:
        raise SettingsError(f"--sections {unknown[0]}: the server has {', '.join(names)}")
    return len(sections)


def _given_server(url: str) -> Server:
    if not re.fullmatch(r"https?://[^/?#\s]+[^?#\s]*", url, re.IGNORECASE):
        raise SettingsError(f"--server {url!r}: expected a URL such as http://127.0.0.1:8000")
    return Server(url, load_client_key())


def _question(song: Song, sections: Sequence[str] | None) -> Question | None:
    if song.path is None:
        return Question.of(song.name, sections)
    try:
        with song.path.open("rb") as file:
            return Question.of(digest(file), sections)
    except OSError:  # said when it is its turn
        return None


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM unwind as Ctrl-C does, so that the server that was started ends."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
