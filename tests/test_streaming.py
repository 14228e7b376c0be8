"""Streams where the engine fails, the client leaves or the server ends: an engine on command."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter import streaming
from adapter.errors import EngineError, EngineOutOfMemoryError
from adapter.request import EngineOutput, EngineRequest
from tests.fakes import FakeEngine
from tests.sse import Received, read_events, texts
from tests.test_api import client


class SteppingEngine(FakeEngine):
    """Tells token by token; `fail` is asked before each step, too, with its number."""

    def __init__(self, *, continuous: bool, step_seconds: float = 0.0) -> None:
        super().__init__(continuous=continuous, step_seconds=step_seconds)
        self.failures: dict[int, EngineError] = {}  # by the number of the step, each once

    async def generate(
        self, prepared: Sequence[EngineRequest]
    ) -> AsyncGenerator[EngineOutput, None]:
        ids = [request.request_id for request in prepared]
        self.inside |= set(ids)
        try:
            for step in range(max(request.sampling.max_new_tokens for request in prepared)):
                await asyncio.sleep(self._step_seconds)
                if step in self.failures:
                    raise self.failures.pop(step)
                for request in prepared:
                    if step < request.sampling.max_new_tokens:
                        yield one_token(request, step)
        finally:
            self.inside -= set(ids)


def one_token(request: EngineRequest, step: int) -> EngineOutput:
    last = step + 1 == request.sampling.max_new_tokens
    return EngineOutput(
        request_id=request.request_id,
        token_ids=(40 + step % 50,),
        finish_reason="length" if last else None,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=0,
    )


@contextlib.asynccontextmanager
async def streamed(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncIterator[list[Received]]:
    """All events of a stream (httpx's ASGI transport hands a response over when it is whole)."""
    response = await http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    yield list(read_events(response.text.split("\n")))


def names(events: Sequence[Received], index: int = 0) -> list[str]:
    """What came about one prompt, repeats as one."""
    told = [event.name for event in events if event.data.get("index") == index]
    return [name for at, name in enumerate(told) if at == 0 or told[at - 1] != name]


@pytest.mark.parametrize("continuous", [True, False])
async def test_a_call_that_fails_in_the_middle_is_told_as_a_restart(
    random_model: Path, continuous: bool
) -> None:
    engine = SteppingEngine(continuous=continuous)
    engine.failures[3] = EngineOutOfMemoryError("planted")
    body = {"prompts": [{"max_new_tokens": 6}, {"max_new_tokens": 6}]}
    async with (
        client(random_model, engine) as http,
        streamed(http, "/generate_batch", body) as told,
    ):
        whole = (await http.post("/generate_batch", json=body)).json()
    assert "restart" in names(told, 0)
    assert names(told, 0)[-2:] == ["delta", "answer"]
    assert list(texts(told).values()) == [one["response"] for one in whole["answers"]]
    assert told[-1].name == "done"


async def test_an_engine_that_never_answers_a_prompt_ends_its_stream_with_an_error(
    random_model: Path,
) -> None:
    engine = SteppingEngine(continuous=True, step_seconds=0.05)
    async with (
        client(random_model, engine, request_timeout_seconds="1") as http,
        streamed(http, "/generate", {"max_new_tokens": 500}) as told,
    ):
        assert told[-1].name == "error"
        assert told[-1].data["error"]["code"] == "deadline_exceeded"
        assert "answer" not in [event.name for event in told]
        assert not engine.inside


async def test_a_batch_that_is_late_tells_what_was_finished_and_an_error_for_the_rest(
    random_model: Path,
) -> None:
    engine = SteppingEngine(continuous=True, step_seconds=0.05)
    body = {"prompts": [{"max_new_tokens": 2}, {"max_new_tokens": 500}]}
    async with (
        client(random_model, engine, request_timeout_seconds="1") as http,
        streamed(http, "/generate_batch", body) as told,
    ):
        answers = {e.data["index"]: e.data for e in told if e.name == "answer"}
        assert answers[0]["error"] is None
        assert answers[1]["error"]["code"] == "deadline_exceeded"
        assert texts(told)[1] == answers[1]["response"] == ""
        assert told[-1].name == "done"


async def test_a_silent_stream_has_heartbeats(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "HEARTBEAT_SECONDS", 0.1)
    engine = SteppingEngine(continuous=True, step_seconds=0.3)
    async with client(random_model, engine) as http:
        response = await http.post("/generate", json={"max_new_tokens": 4, "stream": True})
    assert response.text.count(": still at work\n\n") >= 3
    assert response.headers["cache-control"] == "no-store"


async def test_a_fault_of_the_server_is_told_as_the_last_event(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    engine = SteppingEngine(continuous=True, step_seconds=0.02)
    async with client(random_model, engine) as http:
        monkeypatch.setattr("adapter.service._check_moment_has_song", lambda _: None)
        monkeypatch.setattr("adapter.service.Service._answer", broken)
        response = await http.post("/generate", json={"max_new_tokens": 3, "stream": True})
    events = list(read_events(response.text.split("\n")))
    assert events[-1].name == "error"
    assert events[-1].data["error"]["code"] == "internal_error"
    assert "planted" not in response.text


async def test_a_stream_that_the_server_cuts_off_says_so_last(random_model: Path) -> None:
    engine = SteppingEngine(continuous=True, step_seconds=0.02)
    async with client(random_model, engine) as http:
        body = {"max_new_tokens": 500, "stream": True}
        asking = asyncio.create_task(http.post("/generate", json=body))
        await asyncio.sleep(0.5)
        assert engine.inside
        transport = http._transport
        assert isinstance(transport, httpx.ASGITransport)
        transport.app.state.gate.cut()  # type: ignore[attr-defined]
        response = await asking
    events = list(read_events(response.text.split("\n")))
    assert events[0].name == "delta"
    assert events[-1].name == "error"
    assert events[-1].data["error"]["code"] == "draining"
    assert not engine.inside
