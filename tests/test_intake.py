"""Bodies that never end, and more of them than there is room for."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.types import Message

from adapter.errors import RequestTimeoutError, UnavailableError
from adapter.intake import MIN_BYTES_PER_SECOND, Intake
from tests.fakes import FakeEngine
from tests.test_api import client


def intake(
    *, max_bytes: int = 2**30, timeout_seconds: float = 0.2, max_seconds: float = 60
) -> Intake:
    return Intake(max_bytes=max_bytes, timeout_seconds=timeout_seconds, max_seconds=max_seconds)


class Sender:
    """Sends a chunk of `num_bytes` every `pause_seconds`."""

    def __init__(self, num_bytes: int, pause_seconds: float = 0.0) -> None:
        self._chunk = bytes(num_bytes)
        self._pause_seconds = pause_seconds

    async def __call__(self) -> Message:
        await asyncio.sleep(self._pause_seconds)
        return {"type": "http.request", "body": self._chunk, "more_body": True}


@pytest.mark.parametrize("sender", [Sender(1, 3600), Sender(1, 0.01)], ids=["silent", "drip"])
async def test_a_body_that_does_not_come_is_given_up(sender: Sender) -> None:
    with intake().body(sender) as receive, pytest.raises(RequestTimeoutError):
        async with asyncio.timeout(5):
            while True:
                await receive()


async def test_a_long_body_that_keeps_coming_has_the_time_it_needs() -> None:
    sender = Sender(MIN_BYTES_PER_SECOND, 0.05)
    with intake().body(sender) as receive:
        for _ in range(10):  # 0.5 s, where a silent one has 0.2 s
            await receive()


async def test_a_body_that_stops_has_no_more_time_for_what_came_before() -> None:
    class Stops(Sender):
        async def __call__(self) -> Message:
            message = await super().__call__()
            self._pause_seconds = 3600
            return message

    with intake().body(Stops(2**26)) as receive, pytest.raises(RequestTimeoutError):
        await receive()
        async with asyncio.timeout(5):
            await receive()


async def test_no_body_has_more_than_the_requests_own_time() -> None:
    limited = intake(timeout_seconds=60, max_seconds=0.2)
    with limited.body(Sender(2**20, 0.01)) as receive, pytest.raises(RequestTimeoutError):
        while True:
            await receive()


async def test_the_bodies_of_all_requests_together_have_a_limit() -> None:
    limited = intake(max_bytes=100)
    with limited.body(Sender(60)) as first, limited.body(Sender(60)) as second:
        await first()
        with pytest.raises(UnavailableError) as caught:
            await second()
        assert caught.value.code == "queue_full"
        assert limited.held_bytes == 60
    with limited.body(Sender(100)) as receive:
        await receive()
    assert limited.held_bytes == 0


async def drip() -> AsyncIterator[bytes]:
    yield b'{"prompt": "'
    while True:
        await asyncio.sleep(0.05)
        yield b"a"


async def test_a_slow_body_is_answered_with_408_and_the_connection_closed(
    random_model: Path,
) -> None:
    engine = FakeEngine(continuous=True)
    async with client(random_model, engine, body_timeout_seconds="0.3") as http:
        headers = {"Content-Type": "application/json"}
        response = await http.post("/generate", content=drip(), headers=headers)
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "request_timeout"
    assert response.headers["connection"] == "close"


async def test_a_body_that_never_fits_the_room_is_413_and_leaves_it_as_it_was(
    random_model: Path,
) -> None:
    engine = FakeEngine(continuous=True)
    async with client(random_model, engine, max_bodies_bytes="1KiB") as http:
        large = await http.post("/generate", json={"prompt": "a" * 2000})
        for _ in range(20):
            assert (await http.post("/generate", json={"prompt": "a" * 200})).status_code == 200
    assert large.status_code == 413
