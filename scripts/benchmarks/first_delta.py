"""How soon a stream begins, against the engine called directly.

    python -m benchmarks.first_delta                  songs of 4 minutes, one prompt and 13 at once

From the song's file on the disk to the first `delta` event of the adapter, and to the first token
of AsyncLLM, whose song is decoded within that time too. Each song is new to every cache. What is
printed are medians. The last line of stdout is one JSON document. The exit code is 1 where a stream
begins over 1.1 times as late.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx

from benchmarks.adapter_server import MEDIA_TYPES, prompts_of, running_server, settings_of
from benchmarks.arguments import make_parser
from benchmarks.async_llm import Engine
from benchmarks.report import describe_machine, describe_versions
from benchmarks.workload import (
    FORMATS,
    make_model,
    make_prompts,
    make_songs,
    prepare_environment,
    read_song,
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
        songs = make_songs(
            None, args.seconds, (args.repeats + 1) * len(COUNTS), folder, args.format
        )
        settings = settings_of(model, "vllm", args.dtype)
        with running_server(settings) as server:
            streamed = [first_delta_seconds(server.url, song, n) for song, n in plan(songs)]
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            direct = pool.submit(first_token_seconds, settings, plan(songs)).result()
    return finish(args, streamed, direct)


def plan(songs: Sequence[Path]) -> list[tuple[Path, int]]:
    """Each song, and how many prompts are asked about it; the first of each count warms up."""
    return [(song, COUNTS[index % len(COUNTS)]) for index, song in enumerate(songs)]


def first_delta_seconds(url: str, song: Path, num_prompts: int) -> float:
    """Of one stream, which is read to its end. Raises RuntimeError where there is no delta."""
    prompts = prompts_of(make_prompts(num_prompts), NEW_TOKENS)
    started = time.perf_counter()
    parts: dict[str, Any] = {
        "request": (None, json.dumps({"prompts": prompts, "stream": True}), "application/json"),
        "audio": (song.name, song.read_bytes(), MEDIA_TYPES[song.suffix]),
    }
    seconds = None
    with httpx.stream("POST", f"{url}/generate_batch", files=parts, timeout=None) as response:
        for line in response.iter_lines():
            if seconds is None and line == "event: delta":
                seconds = time.perf_counter() - started
    if seconds is None:
        raise RuntimeError(f"the server answered {response.status_code} and no delta")
    return seconds


def first_token_seconds(settings: dict[str, str], planned: list[tuple[Path, int]]) -> list[float]:
    os.environ.update(settings)
    return asyncio.run(_first_token_seconds(settings, planned))


async def _first_token_seconds(
    settings: dict[str, str], planned: list[tuple[Path, int]]
) -> list[float]:
    engine = await asyncio.to_thread(Engine.start, settings)
    try:
        return [await _ask(engine, song, num_prompts) for song, num_prompts in planned]
    finally:
        await asyncio.to_thread(engine.llm.shutdown)


async def _ask(engine: Engine, song: Path, num_prompts: int) -> float:
    """Until the first token of any prompt; all are answered to their end."""
    started = time.perf_counter()
    samples = await asyncio.to_thread(read_song, song)
    firsts = await asyncio.gather(
        *(
            engine.first_token_at(samples, song.name, prompt, NEW_TOKENS)
            for prompt in make_prompts(num_prompts)
        )
    )
    return min(firsts) - started


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
