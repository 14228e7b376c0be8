"""How soon a stream begins, against the engine called directly.

    python -m benchmarks.first_delta                  songs of 4 minutes, one prompt and 13 at once

From the song's file on the disk to the first `delta` event of the adapter, and to the first token
of the same server's AsyncLLM, called directly (two_door_server.py), which decodes the song within
that time too. Both are asked in turns, each time about a song that is new to every cache. What is
printed are medians. The last line of stdout is one JSON document. The exit code is 1 where a stream
begins over 1.1 times as late.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.adapter_server import CLIENT, MEDIA_TYPES, prompts_of, running_server, settings_of
from benchmarks.arguments import make_parser
from benchmarks.overhead import COMMAND, ask_directly
from benchmarks.report import describe_machine, describe_versions
from benchmarks.workload import (
    FORMATS,
    make_model,
    make_prompts,
    make_songs,
    prepare_environment,
)

LIMIT = 1.1
NEW_TOKENS = 16
COUNTS = (1, 13)  # prompts at once


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_environment(demo=not args.model)
    with tempfile.TemporaryDirectory(prefix="music-flamingo-first-delta-") as name:
        folder = Path(name)
        model = args.model or make_model(args.shape, folder)
        planned = plan(
            make_songs(
                None, args.seconds, 2 * (args.repeats + 1) * len(COUNTS), folder, args.format
            )
        )
        door = str(folder / "door")
        settings = settings_of(model, "vllm", args.dtype) | {"TWO_DOOR_SOCKET": door}
        streamed, direct = [], []
        with running_server(settings, COMMAND) as server:
            for ours, theirs, num_prompts in planned:
                streamed.append(first_delta_seconds(server.url, ours, num_prompts))
                prompts = make_prompts(num_prompts)
                direct.append(ask_directly(door, theirs, prompts, NEW_TOKENS)[0])
    return finish(args, streamed, direct)


def plan(songs: Sequence[Path]) -> list[tuple[Path, Path, int]]:
    """A song for either way, and how many prompts are asked about it; the first of each count
    warms up."""
    pairs = zip(songs[::2], songs[1::2], strict=True)
    return [(*pair, COUNTS[index % len(COUNTS)]) for index, pair in enumerate(pairs)]


def first_delta_seconds(url: str, song: Path, num_prompts: int) -> float:
    """Of one stream, which is read to its end. Raises RuntimeError where there is no delta."""
    prompts = prompts_of(make_prompts(num_prompts), NEW_TOKENS)
    started = time.perf_counter()
    parts: dict[str, Any] = {
        "request": (None, json.dumps({"prompts": prompts, "stream": True}), "application/json"),
        "audio": (song.name, song.read_bytes(), MEDIA_TYPES[song.suffix]),
    }
    seconds = None
    with CLIENT.stream("POST", f"{url}/generate_batch", files=parts) as response:
        for line in response.iter_lines():
            if seconds is None and line == "event: delta":
                seconds = time.perf_counter() - started
    if seconds is None:
        raise RuntimeError(f"the server answered {response.status_code} and no delta")
    return seconds


def finish(args: argparse.Namespace, streamed: Sequence[float], direct: Sequence[float]) -> int:
    ratios = {}
    for index, count in enumerate(COUNTS):
        ours = statistics.median(streamed[index :: len(COUNTS)][1:])
        bare = statistics.median(direct[index :: len(COUNTS)][1:])
        ratios[count] = ours / bare
        print(
            f"{count:>3} prompts: first delta after {ours:.3f} s, first token of the engine after "
            f"{bare:.3f} s, {ratios[count]:.2f} times (limit {LIMIT:g})"
        )
    document = {
        "benchmark": "music-flamingo-adapter first_delta",
        "arguments": vars(args),
        "streamed_seconds": streamed,
        "direct_seconds": direct,
        "ratios": ratios,
        "versions": describe_versions(),
        "machine": describe_machine(),
    }
    print(json.dumps(document))
    return int(max(ratios.values()) > LIMIT)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("first_delta", __doc__)
    add = parser.add_argument
    add("--format", choices=FORMATS, default="wav", help="of the songs (%(default)s)")
    add("--seconds", type=float, default=240.0, help="of a song (%(default)s)")
    add("--repeats", type=int, default=5, help="songs for each number of prompts (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
