"""Sends thousands of odd requests and broken songs to a real server, and reports: `make fuzz`.

    python -m tests.fuzz [--engine vllm] [--requests 10000] [--songs 2000] [--seed N]

Exits with 1 where an answer is a fault (a 5xx that the contract does not have, the wrong shape, a
check of schemathesis that fails), where the server, its engine or a decoder ends, or where memory
grows by more than 5 %. Requests that met a fault are written to a folder; test_corpus.py replays
those that are moved to corpus/.
"""

import argparse
import asyncio
import base64
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import psutil

from adapter.random_model import write_random_model
from tests.fuzz.bodies import ROUTES, URLS, odd_bytes, odd_request
from tests.fuzz.openapi import run_schemathesis
from tests.fuzz.settings import fuzz_settings
from tests.fuzz.sockets import SONG_PATHS, send_raw, song_server
from tests.fuzz.songs import mutated
from tests.fuzz.traffic import NUM_CLIENTS, Request, Tally, json_request, send_all, upload_request
from tests.server import Server, running_server

MAX_GROWTH = 0.05
NUM_PARTS = 6  # of equal size
NUM_WARM_UP = 3  # of them, after which caches and allocators are full
QUIET_SECONDS = 10  # before memory is measured
REPORT = {"sections": ["content_advisory"]}
RAW_SHARE = 0.03  # of the requests, as bytes that need not be HTTP
SCHEMATHESIS_SHARE = 0.3
SIGNS_OF_A_CRASH = ("met a fault", "Traceback", "A decoder crashed", "A decoder was ended")


@dataclass
class Report:
    """What was sent and what came of it; memory is all processes', shared parts counted once."""

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_songs: int = 0
    faults: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)  # after each part
    seconds: float = 0.0

    @property
    def growth(self) -> float:
        if len(self.memory_bytes) <= NUM_WARM_UP:
            return 0.0
        return self.memory_bytes[-1] / self.memory_bytes[NUM_WARM_UP - 1] - 1

    @property
    def passed(self) -> bool:
        return not self.faults and not self.crashes and self.growth <= MAX_GROWTH

    def __str__(self) -> str:
        lines = [
            f"requests  {self.statuses.total()}, of which {self.num_songs} with a broken song",
            f"seconds   {self.seconds:.0f}",
            *(f"  {route:16} {counts}" for route, counts in _by_route(self.statuses)),
            f"faults    {len(self.faults)}",
            *(f"  {fault[:300]}" for fault in self.faults[:20]),
            f"crashes   {len(self.crashes)}",
            *(f"  {crash[:300]}" for crash in self.crashes[:20]),
            f"memory    {', '.join(str(size // 2**20) for size in self.memory_bytes)} MiB "
            f"after each part: {self.growth:+.1%} since the warm-up",
            "passed" if self.passed else "FAILED",
        ]
        return "\n".join(lines)


def _by_route(statuses: Counter[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for route in sorted({route for route, _ in statuses}):
        counts = sorted((status, n) for (at, status), n in statuses.items() if at == route)
        yield route, ", ".join(f"{status}: {n}" for status, n in counts)


@dataclass(frozen=True)
class Load:
    """How much is sent: requests in all, and songs among them."""

    requests: int
    songs: int

    def part(self, share: float) -> "Load":
        return Load(ceil(self.requests * share), ceil(self.songs * share))


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    print(f"seed {args.seed}, {args.engine}", flush=True)
    with tempfile.TemporaryDirectory() as folder, song_server() as port:
        model = Path(folder) / "demo-model"
        write_random_model(model)
        settings = fuzz_settings(args.engine, song_port=port)
        with running_server(model, Path(folder) / "server.log", settings) as server:
            load = Load(args.requests, args.songs)
            report = fuzz(server, port, load, random.Random(args.seed), args.findings)
    print(report)
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument("--requests", type=int, default=10_000, help="at least so many")
    parser.add_argument("--songs", type=int, default=2_000, help="broken songs besides")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument(
        "--findings", type=Path, default=Path("build/fuzz"), help="folder for what is found"
    )
    return parser


def fuzz(server: Server, song_port: int, load: Load, rng: random.Random, findings: Path) -> Report:
    """Send the load in parts, and measure the server after each."""
    began = time.monotonic()
    report = Report()
    process = psutil.Process(server.process.pid)
    for part in range(1, NUM_PARTS + 1):
        send_load(server, song_port, load.part(1 / NUM_PARTS), rng, report, findings)
        report.memory_bytes.append(settled_bytes(process))
        print(f"part {part} after {time.monotonic() - began:.0f} s", flush=True)
    report.crashes = crashes(server)
    report.seconds = time.monotonic() - began
    return report


def send_load(
    server: Server,
    song_port: int,
    load: Load,
    rng: random.Random,
    report: Report,
    findings: Path,
) -> None:
    by_document = run_schemathesis(
        server.url,
        max_examples=max(1, round(load.requests * SCHEMATHESIS_SHARE / len(ROUTES))),
        seed=rng.randrange(2**32),
        workers=NUM_CLIENTS,
    )
    if not by_document.passed:
        findings.mkdir(parents=True, exist_ok=True)
        (findings / "schemathesis.txt").write_text(by_document.report)
        report.faults.append(f"schemathesis: see {findings / 'schemathesis.txt'}")
    num_raw = round(load.requests * RAW_SHARE)
    raw = Tally()
    asyncio.run(send_raw(server, [odd_bytes(rng) for _ in range(num_raw)], raw))
    num_left = load.requests - by_document.statuses.total() - num_raw
    num_by_hand = max(num_left, load.requests // 3)
    urls = URLS + tuple(f"http://127.0.0.1:{song_port}{path}" for path in SONG_PATHS)
    tally = Tally()
    by_hand = (odd_request(rng, urls) for _ in range(num_by_hand))
    asyncio.run(send_all(server.url, by_hand, tally))
    asyncio.run(send_all(server.url, broken_songs(load.songs, rng), tally))
    for found in (raw, tally):
        found.write_faults(findings)
        report.faults += [f"{request.path}: {wrong}" for wrong, request in found.faults]
    report.num_songs += load.songs
    report.statuses += by_document.statuses + raw.statuses + tally.statuses


def broken_songs(count: int, rng: random.Random) -> Iterator[Request]:
    """Half of them uploaded, half in base64; some in a report, which measures them too."""
    routes: dict[str, dict[str, Any]] = {
        "/generate": {},
        "/generate_batch": {"prompts": [{}]},
        "/full_report": REPORT,
    }
    for _ in range(count):
        song = mutated(rng)
        (path,) = rng.choices(list(routes), weights=(4, 4, 2))
        body = routes[path]
        if rng.random() < 0.5:
            yield upload_request(path, body, song)
        else:
            yield json_request(path, {**body, "audio": base64.b64encode(song).decode()})


def settled_bytes(process: psutil.Process) -> int:
    """Memory of a process and all its descendants, when it has been left alone for a while."""
    time.sleep(QUIET_SECONDS)
    family = [process, *process.children(recursive=True)]
    sizes = [member.memory_full_info().pss for member in family]
    print("MiB by process:", *(size // 2**20 for size in sizes), flush=True)
    return sum(sizes)


def crashes(server: Server) -> list[str]:
    """What ended or was started anew: the server, its engine, a decoder; faults in the log."""
    if server.process.poll() is not None:
        return [f"the server ended with {server.process.returncode}"]
    found = []
    if (status := server.get("/health").status_code) != 200:
        found.append(f"/health is {status}")
    metrics = server.get("/metrics").text
    restarts = re.search(r"^adapter_engine_restarts_total ([0-9.]+)", metrics, re.MULTILINE)
    if restarts is None or float(restarts[1]) != 0:
        found.append(f"engine restarts: {restarts and restarts[1]}")
    log = server.log.read_text(errors="replace").splitlines()
    return found + [line for line in log if any(sign in line for sign in SIGNS_OF_A_CRASH)]


if __name__ == "__main__":
    sys.exit(main())
