"""What the adapter takes beside the engine: HTTP and AsyncLLM called directly, on one engine.

    python -m benchmarks.overhead                     songs of 4 minutes, 13 prompts of 64 tokens

One server has two doors: `POST /generate_batch`, and a socket behind which its own AsyncLLM is
called with the same samples and token ids. Both are asked in turns, each time about a song that is
new to every cache, then about the same song again. So neither a process's own pace nor the
machine's, which changes, favours one. What is printed are the medians of all turns and their ratio.
The last line of stdout is one JSON document. The exit code is 1 where a ratio is over its limit.
"""

import argparse
import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.adapter_server import ask, prompts_of, running_server, settings_of
from benchmarks.arguments import make_parser
from benchmarks.report import describe_machine, describe_versions
from benchmarks.workload import (
    FORMATS,
    make_model,
    make_prompts,
    make_songs,
    make_warm_up_song,
    prepare_environment,
)

COMMAND = (sys.executable, str(Path(__file__).with_name("two_door_server.py")))
PROMPTS = make_prompts(13)
NEW_TOKENS = 64
State = Literal["new", "known"]
Seconds = dict[State, list[float]]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_environment(demo=not args.model)
    with tempfile.TemporaryDirectory(prefix="music-flamingo-overhead-") as name:
        folder = Path(name)
        model = args.model or make_model(args.shape, folder)
        songs = make_songs(None, args.seconds, 2 * args.repeats, folder, args.format)
        door = str(folder / "door")
        settings = settings_of(model, "vllm", args.dtype) | {
            "ADAPTER_MAX_GROUP_SIZE": str(len(PROMPTS)),
            "TWO_DOOR_SOCKET": door,
        }
        with running_server(settings, COMMAND) as server:
            ways = (partial(over_http, server.url), partial(directly, door))
            for way in ways:
                way(make_warm_up_song(folder))
            http, direct = take_turns(*ways, songs)
    return finish(args, http, direct)


def over_http(url: str, song: Path) -> float:
    """The seconds of a batch, for its client."""
    batch = {"prompts": prompts_of(PROMPTS, NEW_TOKENS), "group_size": len(PROMPTS)}
    started = time.perf_counter()
    ask(url, song, batch)
    return time.perf_counter() - started


def directly(door: str, song: Path) -> float:
    return ask_directly(door, song, PROMPTS, NEW_TOKENS)[1]


def ask_directly(
    door: str, song: Path, prompts: Sequence[str], max_new_tokens: int
) -> tuple[float, float]:
    """The seconds to the first token and to the last, as the server says."""
    body = {"song": str(song), "prompts": prompts, "max_new_tokens": max_new_tokens}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(door)
        connection.sendall(json.dumps(body).encode() + b"\n")
        with connection.makefile() as answer:
            first, last = json.loads(answer.readline())
    return first, last


def take_turns(
    first: Callable[[Path], float], second: Callable[[Path], float], songs: Sequence[Path]
) -> tuple[Seconds, Seconds]:
    """Ask both about a song each, twice; who begins changes from turn to turn."""
    seconds: tuple[Seconds, Seconds] = ({"new": [], "known": []}, {"new": [], "known": []})
    ways = (first, second)
    for turn in range(len(songs) // 2):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            for state in seconds[which]:
                seconds[which][state].append(ways[which](songs[2 * turn + which]))
    return seconds


def finish(args: argparse.Namespace, http: Seconds, direct: Seconds) -> int:
    limits: dict[State, float] = {"new": args.new, "known": args.known}
    ratios = {state: median(http[state]) / median(direct[state]) for state in limits}
    for state, limit in limits.items():
        print(
            f"song {state:<6} adapter {median(http[state]):.3f} s, engine alone "
            f"{median(direct[state]):.3f} s: {ratios[state]:.3f} times (limit {limit:g})"
        )
    document: dict[str, Any] = {
        "benchmark": "music-flamingo-adapter overhead",
        "arguments": vars(args),
        "adapter_seconds": http,
        "direct_seconds": direct,
        "ratios": ratios,
        "versions": describe_versions(),
        "machine": describe_machine(),
    }
    print(json.dumps(document))
    return int(any(ratios[state] > limits[state] for state in limits))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("overhead", __doc__)
    add = parser.add_argument
    add("--format", choices=FORMATS, default="mp3", help="of the songs (%(default)s)")
    add("--seconds", type=float, default=240.0, help="of a song (%(default)s)")
    add("--repeats", type=int, default=8, help="turns (%(default)s)")
    add("--new", type=float, default=1.15, metavar="LIMIT", help="of a new song (%(default)s)")
    add("--known", type=float, default=1.15, metavar="LIMIT", help="of a known one (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
