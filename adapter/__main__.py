"""The command line: `python -m adapter serve`, `python -m adapter demo-model DIR`."""

import argparse
import logging
import sys
from pathlib import Path

from adapter import __version__
from adapter.errors import SettingsError


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
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
    serve.set_defaults(run=_serve)

    demo = commands.add_parser(
        "demo-model", help="write the demo checkpoint: tiny, random, its answers mean nothing"
    )
    demo.add_argument("directory", type=Path, metavar="DIR", help="a new or empty directory")
    demo.add_argument("--seed", default=0, type=int, help="seed of the weights (%(default)s)")
    demo.add_argument(
        "--shape", default="tiny", choices=["tiny", "small"], help="size (%(default)s)"
    )
    demo.set_defaults(run=_demo_model)
    return parser


def _serve(args: argparse.Namespace) -> int:
    from adapter import logs
    from adapter.server import serve
    from adapter.settings import load_settings

    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)
    return serve(settings, host=args.host, port=args.port)


def _demo_model(args: argparse.Namespace) -> int:
    from adapter.demo_model import SMALL, TINY, write_demo_model

    shape = {"tiny": TINY, "small": SMALL}[args.shape]
    write_demo_model(args.directory, seed=args.seed, shape=shape)
    print(f"wrote {args.directory}: random weights, its answers mean nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
