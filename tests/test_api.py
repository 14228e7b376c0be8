"""The routes, with an engine that fails on command: what a real one cannot be made to do."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter.api import create_app
from adapter.checkpoint import load_checkpoint
from adapter.errors import EngineError, EngineOutOfMemoryError, SettingsError
from adapter.service import Started
from adapter.settings import Settings, load_settings
from tests.fakes import FakeEngine, failing

Post = Callable[..., Any]


@asynccontextmanager
async def client(
    model: Path, start: Callable[[Settings], Started] | FakeEngine, **settings: str
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application whose engine is `start`, or is started by it."""
    variables = {f"ADAPTER_{name.upper()}": value for name, value in settings.items()}
    loaded = load_settings({"ADAPTER_MODEL": str(model), "ADAPTER_USAGE_DB": "", **variables})
    app = create_app(loaded, start=start if callable(start) else service_with(start))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
    ):
        if not callable(start):
            await ready(http)
        yield http


def service_with(engine: FakeEngine) -> Callable[[Settings], Started]:
    def start(settings: Settings) -> Started:
        checkpoint = load_checkpoint(settings.model, max_model_len=settings.max_model_len)
        return Started(checkpoint, engine, "a test")

    return start


async def ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_generate_past_its_deadline_is_504_and_stopped(random_model: Path) -> None:
    engine = FakeEngine(continuous=True, step_seconds=0.05)
    async with client(random_model, engine, request_timeout_seconds="1") as http:
        response = await http.post("/generate", json={"max_new_tokens": 2000})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert len(engine.aborted) == 1


async def test_a_batch_past_its_deadline_answers_with_what_is_finished(random_model: Path) -> None:
    engine = FakeEngine(continuous=True, step_seconds=0.05)
    body = {"prompts": [{"max_new_tokens": 2}, {"max_new_tokens": 2000}]}
    async with client(random_model, engine, request_timeout_seconds="1") as http:
        response = await http.post("/generate_batch", json=body)
    assert response.status_code == 200
    finished, late = response.json()["answers"]
    assert finished["error"] is None and finished["finish_reason"] == "length"
    assert late["error"]["code"] == "deadline_exceeded"
    assert late["response"] == "" and late["finish_reason"] is None
    assert late["elapsed_seconds"] > 0.5  # it paid for its time in the engine


async def test_a_batch_of_which_nothing_is_finished_in_time_is_504(random_model: Path) -> None:
    engine = FakeEngine(continuous=False, step_seconds=0.05)
    body = {"prompts": [{"max_new_tokens": 2000}] * 2}
    async with client(random_model, engine, request_timeout_seconds="1") as http:
        response = await http.post("/generate_batch", json=body)
    assert response.status_code == 504


async def test_a_prompt_that_the_engine_fails_is_its_own_error_in_a_batch(
    random_model: Path,
) -> None:
    engine = FakeEngine(continuous=False, fail=failing(9, EngineOutOfMemoryError))
    async with client(random_model, engine) as http:
        response = await http.post("/generate_batch", json={"prompts": [{}]})
    assert response.status_code == 200
    assert response.json()["answers"][0]["error"]["code"] == "out_of_memory"


async def test_generate_that_the_engine_fails_is_503_with_retry_after(random_model: Path) -> None:
    engine = FakeEngine(continuous=True, fail=failing(9, EngineError))
    async with client(random_model, engine) as http:
        response = await http.post("/generate", json={})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["code"] == "engine_error"


async def test_an_unexpected_fault_is_an_error_without_its_traceback(random_model: Path) -> None:
    def fault(_: object) -> None:
        raise RuntimeError("a secret detail")

    async with client(random_model, FakeEngine(continuous=True, fail=fault)) as http:
        response = await http.post("/generate", json={})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_while_the_engine_starts_health_is_503_and_live_200(random_model: Path) -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def start(settings: Settings) -> Started:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        return service_with(FakeEngine(continuous=True))(settings)

    async with client(random_model, start) as http:
        health, live = await http.get("/health"), await http.get("/live")
        refused = await http.post("/generate", json={})
        release.set()
        await ready(http)
    assert (health.status_code, health.json()["status"]) == (503, "starting")
    assert live.status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
    assert int(refused.headers["retry-after"]) > 0


async def test_an_engine_that_does_not_start_is_said_in_health_and_live(random_model: Path) -> None:
    def start(_: Settings) -> Started:
        raise SettingsError("ADAPTER_MODEL: no such model")

    async with client(random_model, start) as http:
        await asyncio.sleep(0.1)
        health, live = await http.get("/health"), await http.get("/live")
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    assert "no such model" in health.json()["engine_reason"]
    assert live.status_code == 503


async def test_a_configured_rate_is_charged_and_said(random_model: Path) -> None:
    engine = FakeEngine(continuous=True, step_seconds=0.01)
    async with client(random_model, engine, gpu_usd_per_second="0.5") as http:
        answer = (await http.post("/generate", json={"max_new_tokens": 3})).json()
    assert answer["rate_source"] == "configured"
    assert answer["cost_usd"] == answer["elapsed_seconds"] * 0.5 > 0.01


async def test_settings_limit_what_a_request_may_ask(random_model: Path) -> None:
    engine = FakeEngine(continuous=True)
    async with client(
        random_model, engine, max_prompts="2", max_new_tokens="9", max_group_size="3"
    ) as http:
        for body, field in (
            ({"prompts": [{}] * 3}, "prompts"),
            ({"prompts": [{"max_new_tokens": 10}]}, "prompts.0.max_new_tokens"),
            ({"prompts": [{}], "group_size": 4}, "group_size"),
        ):
            response = await http.post("/generate_batch", json=body)
            assert response.status_code == 422
            assert response.json()["error"]["field"] == field


async def test_a_cap_is_lowered_to_what_the_context_has_left(random_model: Path) -> None:
    engine = FakeEngine(continuous=True)
    prompt = {"prompt": "word " * 2700}
    async with client(random_model, engine) as http:
        usage = (await http.post("/generate", json=prompt | {"max_new_tokens": 1})).json()["usage"]
    context_tokens = str(usage["prompt_tokens"] + 5)
    async with client(random_model, engine, max_model_len=context_tokens) as http:
        answer = (await http.post("/generate", json=prompt | {"max_new_tokens": 100})).json()
    assert answer["usage"]["completion_tokens"] == 5


async def test_a_prompt_that_leaves_no_room_is_refused(random_model: Path) -> None:
    async with client(random_model, FakeEngine(continuous=True), max_model_len="2700") as http:
        response = await http.post("/generate", json={"prompt": "word " * 4000})
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "prompt_too_long"


@pytest.mark.parametrize("path", ["/generate", "/generate_batch"])
async def test_the_document_shows_the_servers_own_maxima(random_model: Path, path: str) -> None:
    async with client(random_model, FakeEngine(continuous=True), max_new_tokens="99") as http:
        document = (await http.get("/openapi.json")).json()
    assert path in document["paths"]
    fields = document["components"]["schemas"]["GenerateRequest"]["properties"]
    assert fields["max_new_tokens"]["maximum"] == 99
