"""`Idempotency-Key`: what comes again is answered again, and billed once."""

import asyncio
import io
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter.errors import EngineError, UnavailableError, UnprocessableError
from adapter.idempotency import Replies, Reply, request_digest
from tests.fakes import FakeEngine, failing
from tests.songs import encode, melody
from tests.test_api import client

KEY = {"Idempotency-Key": "b6a1"}
SCOPED = ("", "b6a1")


class Making:
    """Makes a reply when it is let; counts how often it was begun and what became of it."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.reply = Reply(200, body)
        self.let = asyncio.Event()
        self.begun = 0
        self.cancelled = 0

    async def __call__(self) -> Reply:
        self.begun += 1
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.reply


async def ask(
    replies: Replies,
    make: Callable[[], Coroutine[Any, Any, Reply]],
    *,
    key: tuple[str, str] = SCOPED,
    digest: bytes = b"digest",
) -> tuple[Reply, bool]:
    return await replies.reply(key, digest, make, ExitStack())


async def kept(replies: Replies, name: str, body: bytes = b"{}") -> bool:
    """Ask under a name; whether the reply was there already."""
    making = Making(body)
    making.let.set()
    return (await ask(replies, making, key=("", name)))[1]


async def test_the_second_request_gets_the_first_answer_and_costs_nothing(
    random_model: Path,
) -> None:
    engine = FakeEngine(continuous=True)
    body = {"prompts": [{"prompt": "a", "max_new_tokens": 2}, {"prompt": "b"}]}
    async with client(random_model, engine) as http:
        first = await http.post("/generate_batch", json=body, headers=KEY)
        second = await http.post("/generate_batch", json=body, headers=KEY)
        billed = (await http.get("/metrics")).text
    assert first.status_code == second.status_code == 200
    assert first.content == second.content
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert len(engine.calls) == 2  # a call for each prompt, once
    assert 'adapter_prompts_total{outcome="answered"} 2.0' in billed


async def test_without_a_key_every_request_is_answered_anew(random_model: Path) -> None:
    engine = FakeEngine(continuous=True)
    async with client(random_model, engine) as http:
        for _ in range(2):
            await http.post("/generate", json={"max_new_tokens": 2})
    assert len(engine.calls) == 2


async def test_a_request_that_comes_while_the_first_runs_waits_for_its_answer(
    random_model: Path,
) -> None:
    engine = FakeEngine(continuous=True, step_seconds=0.05)
    async with client(random_model, engine) as http:
        asking = [
            asyncio.create_task(http.post("/generate", json={"max_new_tokens": 5}, headers=KEY))
            for _ in range(3)
        ]
        answers = await asyncio.gather(*asking)
    assert len(engine.calls) == 1
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotency-replayed" in answer.headers for answer in answers) == 2


async def test_the_key_with_another_request_is_422(random_model: Path) -> None:
    other = [("/generate", {"prompt": "other"}), ("/generate_batch", {"prompts": [{}]})]
    async with client(random_model, FakeEngine(continuous=True)) as http:
        await http.post("/generate", json={}, headers=KEY)
        responses = [await http.post(path, json=body, headers=KEY) for path, body in other]
    for response in responses:
        assert response.status_code == 422
        error = response.json()["error"]
        assert (error["code"], error["field"]) == ("idempotency_mismatch", "Idempotency-Key")


async def test_a_key_that_is_none_is_422(random_model: Path) -> None:
    engine = FakeEngine(continuous=True)
    bad = [[key] for key in (b"", b"x" * 256, b"caf\xe9", b"tab\there")]
    async with client(random_model, engine) as http:
        responses = [
            await http.post(
                "/generate", json={}, headers=[(b"Idempotency-Key", key) for key in sent]
            )
            for sent in [*bad, [b"sent", b"twice"]]
        ]
    for refused in responses:
        assert refused.status_code == 422
        assert refused.json()["error"]["field"] == "Idempotency-Key"
    assert engine.calls == []


async def test_an_upload_counts_by_its_bytes_not_by_its_boundary(random_model: Path) -> None:
    engine = FakeEngine(continuous=True)
    songs = [encode(melody(seconds), "wav-16") for seconds in (1.0, 2.0)]

    async def send(http: httpx.AsyncClient, song: bytes) -> httpx.Response:
        files = {"request": (None, '{"max_new_tokens": 2}'), "audio": ("song.wav", song)}
        return await http.post("/generate", files=files, headers=KEY)

    async with client(random_model, engine) as http:
        first, again, other = [await send(http, songs[i]) for i in (0, 0, 1)]
    assert first.status_code == 200, first.text
    assert again.content == first.content
    assert other.status_code == 422
    assert len(engine.calls) == 1


async def test_a_refusal_is_kept_and_a_failure_is_tried_anew(random_model: Path) -> None:
    engine = FakeEngine(continuous=True, fail=failing(2, EngineError))
    async with client(random_model, engine) as http:
        failed = await http.post("/generate", json={}, headers=KEY)
        answered = await http.post("/generate", json={}, headers=KEY)
        refused = [
            await http.post("/generate", json={"top_p": 7}, headers={"Idempotency-Key": "other"})
            for _ in range(2)
        ]
    assert (failed.status_code, answered.status_code) == (503, 200)
    assert "idempotency-replayed" not in answered.headers
    assert refused[0].content == refused[1].content
    assert [response.status_code for response in refused] == [422, 422]
    assert refused[1].headers["idempotency-replayed"] == "true"


async def test_who_leaves_does_not_take_the_answer_from_who_waits() -> None:
    replies, making = Replies(), Making()
    first = asyncio.create_task(ask(replies, making))
    await asyncio.sleep(0)
    second = asyncio.create_task(ask(replies, making))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    making.let.set()
    assert await second == (making.reply, True)
    assert (making.begun, making.cancelled) == (1, 0)


async def test_the_work_stops_when_all_have_left_and_starts_anew_for_the_next() -> None:
    replies, making = Replies(), Making()
    waiting = [asyncio.create_task(ask(replies, making)) for _ in range(2)]
    await asyncio.sleep(0.01)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert making.cancelled == 1
    making.let.set()
    assert await ask(replies, making) == (making.reply, False)


async def test_the_files_belong_to_the_work_and_are_closed_at_its_end() -> None:
    replies, making = Replies(), Making()
    upload = io.BytesIO(b"song")
    with ExitStack() as files:
        files.enter_context(upload)
        first = asyncio.create_task(replies.reply(SCOPED, b"digest", making, files))
        await asyncio.sleep(0.01)
    second = asyncio.create_task(ask(replies, making))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first])
    assert not upload.closed
    making.let.set()
    await second
    await asyncio.sleep(0)
    assert upload.closed


async def test_the_files_are_closed_also_where_the_work_never_began() -> None:
    upload = io.BytesIO(b"song")
    files = ExitStack()
    files.enter_context(upload)
    waiting = asyncio.create_task(Replies().reply(SCOPED, b"digest", Making(), files))
    waiting.cancel()
    await asyncio.wait([waiting])
    files.close()
    assert upload.closed


async def test_an_error_goes_to_all_who_wait_and_is_forgotten() -> None:
    async def fail() -> Reply:
        await asyncio.sleep(0.01)
        raise UnavailableError("gone")

    replies = Replies()
    results = await asyncio.gather(*(ask(replies, fail) for _ in range(2)), return_exceptions=True)
    assert all(isinstance(result, UnavailableError) for result in results)
    assert not await kept(replies, SCOPED[1])


async def test_a_reply_of_500_is_not_kept() -> None:
    replies, making = Replies(), Making()
    making.reply = Reply(500, b"{}")
    making.let.set()
    assert [(await ask(replies, making))[1] for _ in range(2)] == [False, False]


async def test_an_answer_is_kept_for_ten_minutes_from_its_end() -> None:
    now = [0.0]
    replies = Replies(clock=lambda: now[0])
    assert not await kept(replies, "a")
    now[0] = 599.9
    assert await kept(replies, "a")
    now[0] = 600.0
    assert not await kept(replies, "a")


async def test_the_oldest_go_first_where_there_are_too_many_replies_or_bytes() -> None:
    replies = Replies(max_replies=2)
    assert [await kept(replies, name) for name in "abcbca"] == [0, 0, 0, 1, 1, 0]
    replies = Replies(max_bytes=100)
    assert [await kept(replies, name, b"x" * 40) for name in "abcbca"] == [0, 0, 0, 1, 1, 0]
    assert not await kept(replies, "large", b"x" * 101)  # answered, if not kept
    assert replies._num_bytes <= 100


async def test_what_runs_is_never_forgotten_for_want_of_room() -> None:
    replies, making = Replies(max_replies=1), Making()
    first = asyncio.create_task(ask(replies, making))
    await asyncio.sleep(0)
    for name in "abc":
        await kept(replies, name)
    making.let.set()
    assert (await ask(replies, making))[1]
    assert (await first)[0] == making.reply
    assert making.begun == 1


async def test_another_scope_has_keys_of_its_own() -> None:
    replies, making = Replies(), Making()
    making.let.set()
    await ask(replies, making, key=("team a", "1"))
    assert not (await ask(replies, making, key=("team b", "1"), digest=b"other"))[1]
    with pytest.raises(UnprocessableError):
        await ask(replies, making, key=("team a", "1"), digest=b"other")


def test_the_digest_is_of_the_values_and_their_types_not_of_their_order() -> None:
    def digest(body: object, upload: bytes | None = None) -> bytes:
        file = None if upload is None else io.BytesIO(upload)
        return request_digest("/generate", body, file)

    assert digest({"a": 1, "b": [None, True]}) == digest({"b": [None, True], "a": 1})
    bodies: list[object] = [
        {"a": 1},
        {"a": "1"},
        {"a": True},
        {"a": None},
        {"a": [1]},
        {"a": [[], []]},
        {"a": [[[]]]},
        {"ab": "c"},
        {"a": "bc"},
        {"a": {}},
        [],
        {},
    ]
    digests = [digest(body) for body in bodies]
    digests += [digest({}, b""), digest({}, b"song"), request_digest("/other", {}, None)]
    assert len(set(digests)) == len(digests)


def test_the_file_stands_at_its_start_after_the_digest() -> None:
    upload = io.BytesIO(b"song")
    upload.seek(2)
    first = request_digest("/generate", {}, upload)
    assert upload.read() == b"song"
    assert request_digest("/generate", {}, io.BytesIO(b"song")) == first
