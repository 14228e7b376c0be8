"""The command line that the tools beside bench.py share."""

import argparse

from benchmarks.workload import SHAPES


def make_parser(
    tool: str, description: str | None, *, engines: bool = False
) -> argparse.ArgumentParser:
    """A parser of `benchmarks.TOOL` that takes a model and, with `engines`, one of the engines."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks.{tool}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", metavar="DIR_OR_HUB_ID", help="default: makes the demo checkpoint")
    add("--shape", choices=SHAPES, default=SHAPES[0], help="of that (%(default)s)")
    if engines:
        add("--engine", choices=["vllm", "transformers"], default="vllm", help="(%(default)s)")
    add("--dtype", default="float32", help="of the weights (%(default)s)")
    return parser
