"""Whether memory and files stay as they are while a server answers one song after the other.

    python -m benchmarks.many_songs                   200 songs of 5 to 20 s, the demo checkpoint

After each song the memory of every process of the server is read (PSS: of what a process shares,
its part), and at the end what is left in its temporary folder, in /dev/shm and among open files.
Decoded songs are not kept and the engine's caches get sizes that a few songs fill, so that what
grows after them is a leak; --default-caches leaves them as they are, and open what is kept. A
table, and as the last line one JSON document, go to stdout. The exit code is 1 where memory was not
flat within 5 % or anything was left.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
from demo_song import write_song
from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks.adapter_server import ask, prompts_of, running_server, settings_of
from benchmarks.arguments import make_parser
from benchmarks.memory import find_pids, find_pss_bytes
from benchmarks.report import describe_machine, describe_versions
from benchmarks.workload import (
    RATE,
    decode,
    make_model,
    prepare_environment,
    write_wav,
)

SECONDS = (5.0, 20.0)
PROMPTS = ("Describe this music.", "Which key is it in?")
NEW_TOKENS = 4
SETTLED_SONGS = 20
KEPT_SONG = "/memfd:samples"  # the decoder's name for the samples of a song
LIMIT = 0.05
SMALL_CACHES = {
    "ADAPTER_SONG_CACHE_BYTES": "0",
    "ADAPTER_MAX_MODEL_LEN": "4096",
    "ADAPTER_ENGINE_ARGS": json.dumps(
        # A window's features are 1.5 MB; 40 blocks of 128 tokens hold a dozen songs.
        {"mm_processor_cache_gb": 0.02, "num_gpu_blocks_override": 40}
    ),
}


@dataclass(frozen=True)
class Reading:
    """A process's memory before the first song, after the 20th (the median of five), and at its
    least and most after that."""

    name: str
    first_bytes: int
    settled_bytes: int
    most_bytes: int
    least_bytes: int
    last_bytes: int
    history_bytes: tuple[int, ...]  # after each tenth song

    @property
    def deviation(self) -> float:
        """The furthest from what it had after the 20th song, as a part of that."""
        furthest = max(self.most_bytes - self.settled_bytes, self.settled_bytes - self.least_bytes)
        return furthest / self.settled_bytes


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_environment(demo=not args.model)
    with tempfile.TemporaryDirectory(prefix="music-flamingo-many-") as name:
        return run(args, Path(name))


def run(args: argparse.Namespace, folder: Path) -> int:
    temporary = folder / "tmp"
    temporary.mkdir()
    write_song(folder / "made.wav", seconds=SECONDS[1] + args.songs / 100)
    samples = decode(folder / "made.wav")
    settings = settings_of(args.model or make_model(args.shape, folder), args.engine, args.dtype)
    settings |= {} if args.default_caches else SMALL_CACHES
    settings["TMPDIR"] = str(temporary)
    with running_server(settings) as server:
        pid = server.process.pid
        ask_about(server.url, samples, -1, folder, args.lengths)  # starts the decoders
        before, files_before = list_files(pid), listing(temporary)
        seconds: list[float] = []
        readings = [read_memory(pid)]
        for index in tqdm(range(args.songs), unit="song", file=sys.stderr):
            started = time.perf_counter()
            ask_about(server.url, samples, index, folder, args.lengths)
            seconds.append(time.perf_counter() - started)
            readings.append(read_memory(pid))
        shared = list_shared(pid)
        time.sleep(1)  # for the last thread to let its file go
        left = {
            "open files": [
                name
                for name in more(list_files(pid), before)
                if not (args.default_caches and name.startswith(KEPT_SONG))
            ],
            "temporary files": more(listing(temporary), files_before),
        }
    left["files after the end"] = listing(temporary)
    left["shared memory after the end"] = [name for name in shared if Path(name).exists()]
    return finish(args, seconds, summarize(readings), left)


def ask_about(url: str, samples: Any, index: int, folder: Path, num_lengths: int) -> None:
    """A song of one of the lengths, beginning somewhere else than the one before."""
    lengths = np.linspace(*SECONDS, num_lengths)
    seconds = float(np.random.default_rng(index + 1).choice(lengths))
    start = (index + 1) * RATE // 100
    path = folder / "song.wav"
    write_wav(path, samples[start : start + int(seconds * 10) * RATE // 10])
    ask(url, path, {"prompts": prompts_of(PROMPTS, NEW_TOKENS)})


def read_memory(pid: int) -> dict[str, int]:
    """The bytes of each process, by its name and id, and of all together."""
    known = {f"{name_process(one)} {one}": find_pss_bytes(one) for one in find_pids(pid)}
    return known | {"all together": sum(known.values())}


def name_process(pid: int) -> str:
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return "ended"
    names = {
        "EngineCore": "engine",
        "Worker": "worker",
        "decoder_worker": "decoder",
        "adapter": "server",
    }
    return next((name for mark, name in names.items() if mark in command), "helper")


def list_files(pid: int) -> list[str]:
    """What the server's processes have open that has no name any more, or only one in memory."""
    names = [
        str(link.readlink())
        for one in find_pids(pid)
        for link in Path(f"/proc/{one}/fd").iterdir()
        if link.is_symlink()
    ]
    return [name for name in names if "(deleted)" in name or name.startswith("/memfd:")]


def list_shared(pid: int) -> list[str]:
    """What the server's processes have mapped of /dev/shm, where others have files too."""
    maps = (Path(f"/proc/{one}/maps").read_text(encoding="utf-8") for one in find_pids(pid))
    names = (line.split()[-1] for text in maps for line in text.splitlines())
    return sorted({name for name in names if name.startswith("/dev/shm/")})


def listing(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def more(now: Sequence[str], before: Sequence[str]) -> list[str]:
    """What there is now and was not before, as often as it is there more."""
    return sorted((Counter(now) - Counter(before)).elements())


def summarize(readings: Sequence[Mapping[str, int]]) -> list[Reading]:
    """Of the processes that were there from the 20th song to the end."""
    late = readings[min(SETTLED_SONGS, len(readings) - 1) :]
    lasting = [name for name in late[0] if all(reading.get(name) for reading in late)]
    return [
        Reading(
            name=name,
            first_bytes=readings[0].get(name, 0),
            settled_bytes=round(median(reading[name] for reading in late[:5])),
            most_bytes=max(reading[name] for reading in late),
            least_bytes=min(reading[name] for reading in late),
            last_bytes=late[-1][name],
            history_bytes=tuple(reading.get(name, 0) for reading in readings[::10]),
        )
        for name in lasting
    ]


def finish(
    args: argparse.Namespace,
    seconds: Sequence[float],
    readings: Sequence[Reading],
    left: Mapping[str, Sequence[str]],
) -> int:
    first, last = median(seconds[:SETTLED_SONGS]), median(seconds[-SETTLED_SONGS:])
    print(
        f"{args.songs} songs in {sum(seconds):.0f} s: {first:.3f} s for one in the middle of the "
        f"first {SETTLED_SONGS}, {last:.3f} of the last; memory in MB (PSS)"
    )
    print(f"{'process':<18}{'first':>8}{'20th':>8}{'least':>8}{'most':>8}{'last':>8}  off")
    for one in readings:
        sizes = (
            one.first_bytes,
            one.settled_bytes,
            one.least_bytes,
            one.most_bytes,
            one.last_bytes,
        )
        columns = "".join(f"{size / 1e6:>8.1f}" for size in sizes)
        print(f"{one.name:<18}{columns}  {one.deviation:.1%}")
    for name, names in left.items():
        print(f"{name}: {', '.join(names) or 'none left'}")
    document = {
        "benchmark": "music-flamingo-adapter many_songs",
        "arguments": vars(args),
        "seconds": seconds,
        "readings": [asdict(one) | {"deviation": one.deviation} for one in readings],
        "left": left,
        "versions": describe_versions(),
        "machine": describe_machine(),
    }
    print(json.dumps(document))
    return int(any(one.deviation > LIMIT for one in readings) or any(left.values()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("many_songs", __doc__, engines=True)
    add = parser.add_argument
    add("--songs", type=int, default=200, help="(%(default)s)")
    add("--lengths", type=int, default=151,
        help="how many: libraries keep code for each shape (%(default)s)")  # fmt: skip
    add("--default-caches", action="store_true", help="leave the caches as large as they are")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
