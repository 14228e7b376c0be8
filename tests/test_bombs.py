"""Hostile files cost their senders an error, and the server little time and memory.

`pytest -s` prints what each one cost.
"""

import base64
import gzip
import json
import os
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio

from adapter.decoder import DecoderPool
from adapter.errors import NotAudioError, UnprocessableError
from tests.bombs import ANSWERED, BOMBS, URL, Bomb, flac_of_59_minutes, opus_of_days
from tests.memory import Watch, family, family_bytes, forget_peak, open_files, peak_bytes
from tests.server import Server, running_server
from tests.songs import encode, melody

MIB = 2**20
MAX_SECONDS = 100  # on a busy machine; the slowest takes 7 on an idle one
MAX_WORKER_BYTES = 512 * MIB  # what it may allocate
MAX_OWN_BYTES = 300 * MIB  # an hour's samples are 230 MB
MAX_SERVER_BYTES = 1_500_000_000  # above idle, for the server and all its processes
MAX_BASE64_BYTES = 1_000_000  # larger bombs are sent as uploads alone
SHORTEST_SECONDS = 0.02  # half an audio token

in_the_pools_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Every bomb as a file, by its name."""
    folder = tmp_path_factory.mktemp("bombs")
    paths = {name: folder / str(index) for index, name in enumerate(BOMBS)}
    for name, path in paths.items():
        path.write_bytes(BOMBS[name].make())
    yield paths
    shutil.rmtree(folder)


# Through the decoder pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecoderPool]:
    pool = DecoderPool(1, max_audio_seconds=3600)
    await pool.start()
    yield pool
    await pool.close()


async def outcome(pool: DecoderPool, path: Path) -> tuple[str, float | None]:
    """The code of the error and None, or `ANSWERED` and the duration."""
    with path.open("rb") as file:
        try:
            song = await pool.decode(file)
        except (NotAudioError, UnprocessableError) as error:
            return error.code, None
        assert len(song.samples) == pytest.approx(song.duration_seconds * 16_000, abs=1)
        return ANSWERED, song.duration_seconds


@pytest.mark.parametrize("name", BOMBS)
@in_the_pools_loop
async def test_a_bomb_gets_its_error_or_its_true_duration_and_costs_little(
    pool: DecoderPool, files: dict[str, Path], name: str
) -> None:
    await outcome(pool, files["WAV that claims 4 GB"])  # the last one may have ended its worker
    (worker_pid,) = worker_pids(pool)
    worker_before, own_before = forget_peak(worker_pid), forget_peak(os.getpid())
    started = time.monotonic()
    with Watch(lambda: peak_bytes(worker_pid)) as watch:
        code, seconds = await outcome(pool, files[name])
    took = time.monotonic() - started
    worker_bytes, own_bytes = watch.peak - worker_before, peak_bytes(os.getpid()) - own_before
    print(
        f"{name}: {files[name].stat().st_size / 1e6:.2f} MB, {code or 'answered'}, {took:.1f} s,"
        f" worker +{worker_bytes / 1e6:.0f} MB, server +{own_bytes / 1e6:.0f} MB"
    )
    assert code == BOMBS[name].code
    assert seconds == pytest.approx(BOMBS[name].seconds, abs=0.06)
    assert took < MAX_SECONDS
    assert worker_bytes < MAX_WORKER_BYTES
    assert own_bytes < MAX_OWN_BYTES


def worker_pids(pool: DecoderPool) -> list[int]:
    return [worker.process.pid for worker in pool._workers]


@in_the_pools_loop
async def test_a_playlist_reaches_no_address(pool: DecoderPool, tmp_path: Path) -> None:
    path = tmp_path / "playlist"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/song.mp3".encode()
        for name, bomb in BOMBS.items():
            if name.startswith("playlist"):
                path.write_bytes(bomb.make().replace(URL.encode(), url))
                assert await outcome(pool, path) == (bomb.code, None)
        with pytest.raises(BlockingIOError):
            listener.accept()


# Through a whole server


@dataclass(frozen=True)
class Request:
    """What is sent to `/generate`, and what must come: an error's code and its status class."""

    name: str
    make: Callable[[], dict[str, object]]
    code: str
    seconds: float | None = None


@dataclass(frozen=True)
class Sent:
    """A request with what came of it."""

    request: Request
    response: httpx.Response
    started: float
    ended: float

    @property
    def code(self) -> str:
        body = self.response.json()
        return str(body["error"]["code"]) if body["error"] else ANSWERED


@pytest.fixture(scope="module")
def server(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own, whose temporary files go to a folder beside its log."""
    folder = tmp_path_factory.mktemp("bombed")
    (folder / "tmp").mkdir()
    settings = {
        "ADAPTER_ENGINE": "transformers",
        "ADAPTER_MAX_SONGS_BYTES": "700MiB",  # three songs of 59 minutes
        "ADAPTER_SONG_CACHE_BYTES": "0",  # what is open afterwards is a leak
        "TMPDIR": str(folder / "tmp"),
    }
    with running_server(random_model, folder / "server.log", settings) as server:
        yield server


# Songs are decoded whole, but the engine hears little: it is not what is tested.
ASKED = {"max_new_tokens": 1, "end_seconds": 5}


def upload(data: bytes) -> dict[str, object]:
    request = (None, json.dumps(ASKED).encode(), "application/json")
    return {"files": {"request": request, "audio": ("a.mp3", data, "audio/mpeg")}}


def in_base64(data: bytes) -> dict[str, object]:
    return {"json": {**ASKED, "audio": base64.b64encode(data).decode()}}


GOOD = Request("a good song", lambda: upload(encode(melody(5), "flac")), ANSWERED)


def as_body(body: bytes, **headers: str) -> dict[str, object]:
    return {"content": body, "headers": {"content-type": "application/json", **headers}}


def unpacking_bodies() -> list[Request]:
    """Bodies that are bombs themselves."""
    zeros = gzip.compress(bytes(64 * MIB), 1)
    chunks = (b" " * MIB for _ in range(100))
    return [
        Request(
            "a gzipped body",
            lambda: as_body(zeros, **{"content-encoding": "gzip"}),
            "unsupported_media_type",
        ),
        Request(
            "a body without an end",
            lambda: {"content": chunks, "headers": {"content-type": "application/json"}},
            "too_large",
        ),
        Request("25 MB of Opus in base64", lambda: in_base64(opus_of_days()), "audio_too_long"),
        Request("47 MB of zeros in base64", lambda: in_base64(bytes(47_000_000)), "not_audio"),
        Request(
            "64 MB of blanks as base64",
            lambda: as_body(json.dumps({"audio": " " * 66_000_000}).encode()),
            "not_audio",
        ),
    ]


def all_requests(files: dict[str, Path]) -> Iterator[Request]:
    for name, bomb in BOMBS.items():
        yield request_of(name, bomb, partial(upload_file, files[name]))
        if files[name].stat().st_size < MAX_BASE64_BYTES:
            data = files[name].read_bytes()
            yield request_of(f"{name}, in base64", bomb, partial(in_base64, data))
    yield from unpacking_bodies()


def request_of(name: str, bomb: Bomb, make: Callable[[], dict[str, object]]) -> Request:
    if bomb.seconds is not None and bomb.seconds < SHORTEST_SECONDS:
        return Request(name, make, "audio_too_short")
    return Request(name, make, bomb.code, bomb.seconds)


def upload_file(path: Path) -> dict[str, object]:
    return upload(path.read_bytes())


def send(server: Server, request: Request) -> Sent:
    content = request.make()
    started = time.monotonic()
    response = httpx.post(server.url + "/generate", timeout=300, **content)  # type: ignore[arg-type]
    return Sent(request, response, started, time.monotonic())


@pytest.fixture(scope="module")
def bombed(server: Server, files: dict[str, Path]) -> tuple[list[Sent], int]:
    """All that came of sending every bomb, two at a time, and the peak above idle in bytes."""
    process = psutil.Process(server.process.pid)
    send(server, GOOD)
    idle_bytes = family_bytes(process)
    idle_cpu_seconds = sum(sum(one.cpu_times()[:4]) for one in family(process))
    with Watch(lambda: family_bytes(process)) as watch, ThreadPoolExecutor(2) as senders:
        sent = list(senders.map(lambda request: send(server, request), all_requests(files)))
    for one in sent:
        peak = watch.peak_between(one.started, one.ended) - idle_bytes
        print(
            f"{one.request.name}: {one.response.status_code} {one.code},"
            f" {one.ended - one.started:.1f} s, +{peak / 1e6:.0f} MB with its neighbour"
        )
    peak = watch.peak - idle_bytes
    cpu_seconds = sum(sum(one.cpu_times()[:4]) for one in family(process)) - idle_cpu_seconds
    print(f"the server used {cpu_seconds:.0f} s of processor time")
    print(f"{len(sent)} requests, idle {idle_bytes / 1e6:.0f} MB, peak +{peak / 1e6:.0f} MB")
    return sent, peak


def test_every_bomb_gets_a_415_a_413_a_422_or_its_answer(bombed: tuple[list[Sent], int]) -> None:
    sent, _ = bombed
    assert {one.response.status_code for one in sent} <= {200, 413, 415, 422}
    assert {one.request.name: one.code for one in sent} == {
        one.request.name: one.request.code for one in sent
    }


def test_every_bomb_that_is_answered_has_its_true_duration(
    bombed: tuple[list[Sent], int],
) -> None:
    for one in bombed[0]:
        if one.request.seconds is not None:
            duration = one.response.json()["audio"]["duration_seconds"]
            assert duration == pytest.approx(one.request.seconds, abs=0.06), one.request.name


def test_the_memory_of_the_whole_server_stays_within_its_limit(
    bombed: tuple[list[Sent], int],
) -> None:
    assert bombed[1] < MAX_SERVER_BYTES


def test_a_batch_of_many_long_songs_is_refused_past_the_room_for_them(server: Server) -> None:
    process = psutil.Process(server.process.pid)
    idle_bytes = family_bytes(process)
    prompts = [in_base64(flac_of_59_minutes(less))["json"] for less in range(12)]
    with Watch(lambda: family_bytes(process)) as watch:
        answers = server.post("/generate_batch", {"prompts": prompts}).json()["answers"]
    peak = watch.peak - idle_bytes
    print(f"a batch of 12 songs of 59 minutes: peak +{peak / 1e6:.0f} MB")
    codes = [answer["error"] and answer["error"]["code"] for answer in answers]
    assert sorted(codes, key=str) == [None] * 3 + ["queue_full"] * 9
    assert peak < MAX_SERVER_BYTES


@pytest.mark.usefixtures("bombed")
def test_a_good_song_is_answered_after_the_bombs(server: Server) -> None:
    for _ in range(4):
        assert send(server, GOOD).response.status_code == 200


@pytest.mark.usefixtures("bombed")
def test_the_bombs_leave_no_process_no_file_and_no_traceback(server: Server) -> None:
    process = psutil.Process(server.process.pid)
    wait_until(lambda: not songs_open(process))
    decoders = [one for one in family(process) if "adapter.decoder_worker" in one.cmdline()]
    assert len(decoders) == 2
    assert list((server.log.parent / "tmp").iterdir()) == []
    assert "Traceback" not in server.log.read_text()


def songs_open(process: psutil.Process) -> list[str]:
    """The uploads and memory files that a server or a decoder has open."""
    links = [str(link.readlink()) for one in family(process) for link in open_files(one.pid)]
    return [link for link in links if re.search("^/memfd:samples|/bombed[0-9]*/tmp/", link)]


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
