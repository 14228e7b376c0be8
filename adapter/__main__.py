"""The command line: `python -m adapter serve`, `report SONG`, `usage`, `demo-model DIR`."""

import argparse
import math
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TextIO

from adapter import __version__
from adapter.errors import SettingsError
from adapter.usage_report import GROUPS, format_totals, open_report, parse_moment, write_csv


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (SettingsError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m adapter", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve", help="serve the API; settings come from ADAPTER_* environment variables"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument("--port", default=8000, type=int, help="port to listen on (%(default)s)")
    serve.add_argument(
        "--root-path", default="", metavar="/PREFIX", help="what a proxy in front strips from paths"
    )
    serve.set_defaults(run=_serve)

    _add_report(commands.add_parser("report", help="write the reports of many songs to a file"))

    demo = commands.add_parser(
        "demo-model", help="write the demo checkpoint: tiny, random, its answers mean nothing"
    )
    demo.add_argument("directory", type=Path, metavar="DIR", help="a new or empty directory")
    demo.add_argument("--seed", default=0, type=int, help="seed of the weights (%(default)s)")
    demo.add_argument(
        "--shape", default="tiny", choices=["tiny", "small"], help="size (%(default)s)"
    )
    demo.set_defaults(run=_random_model)

    usage = commands.add_parser(
        "usage", help="print what was used and owed, or export it; a server may be running"
    )
    usage.add_argument("--db", type=Path, metavar="PATH", help="the log (ADAPTER_USAGE_DB's)")
    usage.add_argument(
        "--since", type=_moment, metavar="DATE", help="from this date or moment on (UTC)"
    )
    usage.add_argument(
        "--until", type=_moment, metavar="DATE", help="what ended before this date or moment (UTC)"
    )
    output = usage.add_mutually_exclusive_group()
    output.add_argument(
        "--by",
        nargs="+",
        choices=GROUPS,
        default=["key", "outcome", "day"],
        help="a line for each combination of these (key outcome day)",
    )
    output.add_argument(
        "--csv", metavar="FILE", help="write every record to a file, or to the output (-)"
    )
    usage.set_defaults(run=_usage)
    return parser


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a line of JSON for each song; a next run asks for the rest."
    parser.epilog = "A server that wants an API key: set ADAPTER_CLIENT_KEY to it."
    parser.add_argument(
        "songs", nargs="+", metavar="SONG", help="a file, a directory of them, or an http(s) URL"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("reports.jsonl"),
        metavar="FILE",
        help="where the reports go, behind those that are there (%(default)s)",
    )
    parser.add_argument(
        "--server", metavar="URL", help="who answers; without it, a server is started and ended"
    )
    parser.add_argument(
        "--sections", nargs="+", metavar="NAME", help="presets of the report (all of them)"
    )
    parser.add_argument("--seed", type=_at_least_0, help="for the same report again")
    parser.add_argument(
        "--group-size", type=_at_least_1, metavar="N", help="sections that decode together"
    )
    parser.add_argument(
        "--parallel",
        type=_at_least_1,
        default=1,
        metavar="N",
        help="songs that are asked for at once (%(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=900.0,
        metavar="SECONDS",
        help="the most for a song, its waits and new tries in it (%(default)g)",
    )
    parser.set_defaults(run=_report)


def _at_least_0(text: str) -> int:
    return _integer(text, 0)


def _at_least_1(text: str) -> int:
    return _integer(text, 1)


def _integer(text: str, minimum: int) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {minimum} on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds above 0")
    return seconds


def _moment(text: str) -> datetime:
    try:
        return parse_moment(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a date or a moment (2026-01-31, 2026-01-31T18:00)"
        ) from None


def _serve(args: argparse.Namespace) -> int:
    from adapter import logs
    from adapter.server import serve
    from adapter.settings import load_settings

    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)
    return serve(settings, host=args.host, port=args.port, root_path=args.root_path)


def _report(args: argparse.Namespace) -> int:
    from adapter.report_command import report

    return report(args)


def _random_model(args: argparse.Namespace) -> int:
    from adapter.random_model import SMALL, TINY, write_random_model

    shape = {"tiny": TINY, "small": SMALL}[args.shape]
    write_random_model(args.directory, seed=args.seed, shape=shape)
    print(f"wrote {args.directory}: random weights, its answers mean nothing")
    return 0


def _usage(args: argparse.Namespace) -> int:
    path = args.db or _configured_usage_db()
    with open_report(path, since=args.since, until=args.until) as report:
        if args.csv is None:
            print(format_totals(args.by, report.totals(args.by)))
            return 0
        with _output(args.csv) as file:
            count = write_csv(report, file)
    if args.csv != "-":
        print(f"wrote {args.csv}: {count} records")
    return 0


def _configured_usage_db() -> Path:
    from adapter.settings import load_settings

    path = load_settings().usage_db
    if path is None:
        raise SettingsError("ADAPTER_USAGE_DB is empty: name the usage log with --db")
    return Path(path)


def _output(name: str) -> AbstractContextManager[TextIO]:
    if name == "-":
        return nullcontext(sys.stdout)
    try:
        return Path(name).open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot write {name!r}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
