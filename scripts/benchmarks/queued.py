"""Whether a prompt costs more the more of them wait.

    python -m benchmarks.queued                       64, 640 and 5,000 prompts at once

All are about one known song, in batches of 64 that are sent at once, with short answers. What is
printed is the wall and the billed seconds for each prompt. A table, and as the last line one JSON
document, go to stdout. The exit code is 1 where a prompt costs over 1.2 times as much with the most
as with the fewest.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.adapter_server import ask, prompts_of, running_server, settings_of
from benchmarks.arguments import make_parser
from benchmarks.report import describe_machine, describe_versions
from benchmarks.workload import (
    make_model,
    make_prompts,
    make_warm_up_song,
    prepare_environment,
)

BATCH = 64
NEW_TOKENS = 4
LIMIT = 1.2
SEVERAL_BELOW = 1000


@dataclass(frozen=True)
class Depth:
    """So many prompts that were sent at once, and what they took together."""

    num_prompts: int
    wall_seconds: float
    billed_seconds: float

    @property
    def cost(self) -> float:
        """The wall seconds of a prompt."""
        return self.wall_seconds / self.num_prompts

    def __str__(self) -> str:
        billed = self.billed_seconds / self.num_prompts
        return (
            f"{self.num_prompts:>6} prompts at once: {self.wall_seconds:.2f} s, "
            f"{self.cost * 1000:.2f} ms a prompt, billed {billed * 1000:.2f} ms"
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_environment(demo=not args.model)
    with tempfile.TemporaryDirectory(prefix="music-flamingo-queued-") as name:
        folder = Path(name)
        model = args.model or make_model(args.shape, folder)
        settings = settings_of(model, args.engine, args.dtype)
        settings["ADAPTER_MAX_QUEUED"] = str(max(args.prompts))
        song = make_warm_up_song(folder)
        with running_server(settings) as server:
            send(server.url, song, BATCH)  # warms up
            depths = [measure(server.url, song, count) for count in sorted(args.prompts)]
    return finish(args, depths)


def measure(url: str, song: Path, num_prompts: int) -> Depth:
    """The one in the middle of several, where there are few prompts: those are soon answered."""
    several = 5 if num_prompts < SEVERAL_BELOW else 1
    runs = [send(url, song, num_prompts) for _ in range(several)]
    return sorted(runs, key=lambda run: run.cost)[several // 2]


def send(url: str, song: Path, num_prompts: int) -> Depth:
    """Raises RuntimeError where a batch was refused or a prompt failed."""
    sizes = [min(BATCH, num_prompts - start) for start in range(0, num_prompts, BATCH)]
    batches = [{"prompts": prompts_of(make_prompts(size), NEW_TOKENS)} for size in sizes]
    started = time.perf_counter()
    with ThreadPoolExecutor(len(batches)) as clients:
        bodies = list(clients.map(lambda batch: ask(url, song, batch), batches))
    wall_seconds = time.perf_counter() - started
    errors = [one["error"] for body in bodies for one in body["answers"] if one["error"]]
    if errors:
        raise RuntimeError(f"{len(errors)} prompts failed: {errors[0]['message']}")
    return Depth(num_prompts, wall_seconds, sum(body["elapsed_seconds"] for body in bodies))


def finish(args: argparse.Namespace, depths: Sequence[Depth]) -> int:
    for depth in depths:
        print(depth)
    growth = depths[-1].cost / depths[0].cost
    print(f"a prompt costs {growth:.2f} times as much with the most (limit {LIMIT:g})")
    document = {
        "benchmark": "music-flamingo-adapter queued",
        "arguments": vars(args),
        "depths": [asdict(depth) for depth in depths],
        "growth": growth,
        "versions": describe_versions(),
        "machine": describe_machine(),
    }
    print(json.dumps(document))
    return int(growth > LIMIT)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("queued", __doc__, engines=True)
    add = parser.add_argument
    add("--prompts", type=int, nargs="+", default=[64, 640, 5000], help="(%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
