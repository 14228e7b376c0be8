"""The log: one line a request, its id, and nothing of what was asked."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter import logs
from adapter.errors import EngineError, EngineOutOfMemoryError
from adapter.logs import current_request
from tests.fakes import FakeEngine, failing
from tests.server import running_server
from tests.test_api import client

SECRET = "hunter2"
NAMES = ("adapter", "httpx", "uvicorn", "uvicorn.access")


@contextmanager
def logged(log_format: logs.LogFormat = "text", level: str = "debug") -> Iterator[io.StringIO]:
    """The log as `configure` sets it up, in a text; all is undone after."""
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, NAMES)]
    before = [(one, one.level, one.handlers[:], one.propagate) for one in loggers]
    root.handlers.clear()
    text = io.StringIO()
    try:
        logs.configure(level, log_format)
        (handler,) = root.handlers
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(text)
        yield text
    finally:
        for one, old_level, handlers, propagate in before:
            one.setLevel(old_level)
            one.handlers[:] = handlers
            one.propagate = propagate


def lines(text: io.StringIO, logger: str = "adapter.logs") -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in text.getvalue().splitlines()]
    return [entry for entry in entries if entry["logger"] == logger]


async def test_a_request_is_one_line_with_its_numbers(random_model: Path) -> None:
    engine = FakeEngine(continuous=True, step_seconds=0.01)
    body = {"prompts": [{"max_new_tokens": 2}, {"max_new_tokens": 4}]}
    with logged("json", "info") as text:
        async with client(random_model, engine) as http:
            response = await http.post("/generate_batch", json=body)
            await http.get("/health")
            await http.get("/metrics")
    (line,) = lines(text)
    answer = response.json()
    assert line["request_id"] == response.headers["x-request-id"]
    assert (line["route"], line["status"], line["level"]) == ("/generate_batch", 200, "info")
    assert (line["prompts"], line["prompts_answered"], line["replayed"]) == (2, 2, False)
    assert line["engine_seconds"] == pytest.approx(answer["elapsed_seconds"], abs=1e-6)
    assert line["cost_usd"] == pytest.approx(answer["cost_usd"], abs=1e-8)
    assert line["wall_seconds"] >= answer["timings"]["wall_seconds"] - 1e-3
    assert {"audio_seconds", "queue_seconds", "time"} <= line.keys()


@pytest.mark.parametrize(
    ("sections", "num_prompts"), [(None, 13), (["mood_tags", "lyric_transcription"], 2)]
)
async def test_a_report_counts_its_sections_also_where_its_song_is_none(
    random_model: Path, sections: list[str] | None, num_prompts: int
) -> None:
    body = {"audio": "bm90IGEgc29uZw==", "sections": sections}
    with logged("json", "info") as text:
        async with client(random_model, FakeEngine(continuous=True)) as http:
            await http.post("/full_report", json=body)
    (line,) = lines(text)
    assert line["prompts"] == num_prompts


async def test_as_text_the_line_is_pairs(random_model: Path) -> None:
    with logged() as text:
        async with client(random_model, FakeEngine(continuous=True)) as http:
            await http.post("/generate", json={}, headers={"X-Request-Id": 'a="b"'})
    (line,) = [line for line in text.getvalue().splitlines() if "route=/generate" in line]
    assert " INFO adapter.logs: request " in line
    assert r'request_id="a=\"b\""' in line
    assert " status=200 prompts=1 " in line and " replayed=false " in line


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("fault", [None, RuntimeError, EngineError, EngineOutOfMemoryError])
async def test_nothing_of_what_was_asked_is_logged(
    random_model: Path, log_format: logs.LogFormat, fault: type[Exception] | None
) -> None:
    def fail(_: object) -> None:
        if fault is RuntimeError:
            try:
                raise ValueError(f"bad prompt {SECRET}")
            except ValueError as error:
                raise RuntimeError(SECRET) from error

    if fault not in (None, RuntimeError):
        fail = failing(9, fault)  # type: ignore[arg-type, assignment]
    secrets = {
        "Authorization": f"Bearer {SECRET}",
        "Idempotency-Key": SECRET,
        "X-Secret": SECRET,
        "X-Request-Id": f"spaces are not sane {SECRET}",
    }
    bodies: list[Any] = [
        {"prompt": SECRET, "max_new_tokens": 2},
        {"prompt": SECRET, "audio_url": f"http://127.0.0.1:9/{SECRET}?sig={SECRET}"},
        {"prompt": SECRET, "audio": SECRET},
        {"prompt": {SECRET: SECRET}, SECRET: 1},
        {"prompt": "x" * 25_000 + SECRET},
    ]
    with logged(log_format) as text:
        async with client(random_model, FakeEngine(continuous=False, fail=fail)) as http:
            for number, body in enumerate(bodies):
                headers = secrets | {"Idempotency-Key": f"{SECRET}{number}"}
                await http.post(f"/generate?token={SECRET}", json=body, headers=headers)
                await http.post("/generate_batch", json={"prompts": [body]}, headers=headers)
            await http.post("/generate", content=f'{{"prompt": "{SECRET}', headers=secrets)
            files = {"request": (None, SECRET), SECRET: (SECRET, SECRET.encode())}
            await http.post("/generate", files=files, headers=secrets)
            await http.post(f"/{SECRET}", headers=secrets)
            await http.get(f"/health?{SECRET}={SECRET}", headers=secrets)
    assert text.getvalue().count("route=") + text.getvalue().count('"route"') >= 12
    assert SECRET not in text.getvalue()


async def test_a_fault_is_logged_with_the_place_but_not_the_message(random_model: Path) -> None:
    def fail(_: object) -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise RuntimeError(SECRET) from error

    with logged("json") as text:
        async with client(random_model, FakeEngine(continuous=True, fail=fail)) as http:
            response = await http.post("/generate", json={})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    (entry,) = [line for line in lines(text) if line["level"] == "error"]
    assert entry["request_id"] == response.headers["x-request-id"]
    for part in ("test_logs.py", "builtins.KeyError", "builtins.RuntimeError"):
        assert part in entry["message"]
    assert SECRET not in text.getvalue()


def test_under_uvicorns_own_command_no_secret_is_logged_either(
    random_model: Path, tmp_path: Path
) -> None:
    settings = {"ADAPTER_ENGINE": "transformers", "ADAPTER_LOG_LEVEL": "debug"}
    command = [sys.executable, "-m", "uvicorn", "adapter.api:app"]
    with running_server(random_model, tmp_path / "log", settings, command) as server:
        url = f"http://127.0.0.1:9/{SECRET}?sig={SECRET}"
        for body in ({"prompt": SECRET, "max_new_tokens": 2}, {"audio_url": url}):
            httpx.post(
                f"{server.url}/generate?token={SECRET}",
                json=body,
                headers={"Authorization": f"Bearer {SECRET}"},
                timeout=60,
            )
    written = server.log.read_text()
    assert written.count("route=/generate ") == 2
    assert SECRET not in written


async def test_a_sane_request_id_is_sent_back_whatever_the_answer(random_model: Path) -> None:
    body = {"max_new_tokens": 2}
    async with client(random_model, FakeEngine(continuous=True)) as http:
        for path in ("/generate", "/generate_batch", "/health", "/nowhere", "/live"):
            for sent in ("a", "!" + "~" * 127, "01J-trace.id/7"):
                response = await http.post(path, json=body, headers={"X-Request-Id": sent})
                assert response.headers.get_list("x-request-id") == [sent]


async def test_another_one_is_replaced(random_model: Path) -> None:
    bad = [[one] for one in (b"", b"two words", b"x" * 129, b"caf\xe9", b"tab\there")]
    async with client(random_model, FakeEngine(continuous=True)) as http:
        responses = [
            await http.get("/live", headers=[(b"X-Request-Id", one) for one in sent])
            for sent in [*bad, [b"sent", b"twice"]]
        ]
    made = [response.headers["x-request-id"] for response in responses]
    assert len(set(made)) == len(responses)
    assert all(len(one) == 32 and one.isalnum() for one in made)


async def test_the_record_is_the_requests_own_and_gone_after_it(random_model: Path) -> None:
    seen: list[str | None] = []

    def note(_: object) -> None:
        record = current_request()
        seen.append(record and record.id)

    async with client(random_model, FakeEngine(continuous=True, fail=note)) as http:
        for name in ("one", "two"):
            await http.post("/generate", json={}, headers={"X-Request-Id": name})
    assert seen == ["one", "two"]
    assert current_request() is None


async def test_a_replayed_answer_is_said_to_be_one_and_costs_nothing(random_model: Path) -> None:
    with logged("json") as text:
        async with client(random_model, FakeEngine(continuous=True, step_seconds=0.01)) as http:
            for _ in range(2):
                await http.post(
                    "/generate", json={"max_new_tokens": 2}, headers={"Idempotency-Key": "k"}
                )
    first, second = [line for line in lines(text) if line["route"] == "/generate"]
    assert (first["replayed"], second["replayed"]) == (False, True)
    assert first["engine_seconds"] > 0 == second["engine_seconds"]
