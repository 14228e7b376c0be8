"""`"stream": true` on a real server: the same answers and the same bill, as they are written."""

import time
from typing import Any

import httpx
import pytest

from tests.server import LONG_LIST, Server
from tests.sse import Received, streamed, texts
from tests.wire.audio import as_base64, song

SEEDED = {"do_sample": True, "temperature": 1.2, "seed": 5}
SAID = ("response", "reasoning", "data", "error", "finish_reason", "audio")
SECTIONS = ["mood_tags", "song_description", "content_advisory"]


def body_of_a_batch() -> dict[str, Any]:
    prompts: list[dict[str, Any]] = [
        {"prompt": f"Part {i}?", "max_new_tokens": 8 + i, **(SEEDED if i % 2 else {})}
        for i in range(6)
    ]
    prompts.append({"prompt": "?", "start_seconds": 99})  # past the song's end
    prompts.append({"json_schema": LONG_LIST, "max_new_tokens": 6})
    return {"audio": as_base64(song(4)), "prompts": prompts}


def said(answer: dict[str, Any]) -> dict[str, Any]:
    return {field: answer[field] for field in SAID}


def answers_of(events: list[Received]) -> list[dict[str, Any]]:
    told = {event.data["index"]: event.data for event in events if event.name == "answer"}
    return [told[index] for index in sorted(told)]


def billed_seconds(server: Server) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("adapter_billed_seconds_total{")
    )


def test_a_streamed_batch_is_the_batch(server: Server) -> None:
    body = body_of_a_batch()
    whole = server.post("/generate_batch", body).json()
    before = billed_seconds(server)
    with streamed(server.url + "/generate_batch", body) as stream:
        events = list(stream)
    answers = answers_of(events)
    assert [said(answer) for answer in answers] == [said(answer) for answer in whole["answers"]]
    assert texts(events) == {
        index: answer["response"]
        for index, answer in enumerate(whole["answers"])
        if answer["response"]
    }
    assert events[-1].name == "done"
    totals = events[-1].data
    assert totals.keys() == whole.keys() - {"answers"}
    assert totals["elapsed_seconds"] == pytest.approx(sum(a["elapsed_seconds"] for a in answers))
    assert billed_seconds(server) - before == pytest.approx(totals["elapsed_seconds"], rel=1e-6)


def test_text_comes_before_its_answer_is_finished(server: Server) -> None:
    body = {"prompt": "A list, please.", "json_schema": LONG_LIST, "max_new_tokens": 200}
    with streamed(server.url + "/generate", body) as stream:
        events = [(event.name, time.monotonic()) for event in stream]
    names = [name for name, _ in events]
    assert names.count("delta") > 20
    assert names[-2:] == ["answer", "done"]
    first, last = events[0][1], events[-1][1]
    assert last - first > 0.02  # not all at once


def test_a_request_that_fails_before_its_first_event_is_an_ordinary_error(server: Server) -> None:
    for body in (
        {"audio": as_base64(song(2)), "start_seconds": 99, "stream": True},
        {"max_new_tokens": 0, "stream": True},
        {"audio": "bm8gYXVkaW8gYXQgYWxs", "stream": True},
    ):
        response = server.post("/generate", body)
        assert response.status_code in (415, 422)
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["message"]


def test_a_stream_and_an_idempotency_key_exclude_each_other(server: Server) -> None:
    response = httpx.post(
        server.url + "/generate",
        json={"stream": True, "max_new_tokens": 2},
        headers={"Idempotency-Key": "a"},
    )
    assert response.status_code == 422
    assert response.json()["error"]["field"] == "Idempotency-Key"


def test_closing_a_stream_frees_the_engine_within_a_second(server: Server) -> None:
    body = {"json_schema": LONG_LIST, "max_new_tokens": 1500}
    with streamed(server.url + "/generate", body) as events:
        assert next(events).name == "delta"
        assert "adapter_num_requests_running 1.0" in server.get("/metrics").text
    left = time.monotonic()
    while "adapter_num_requests_running 0.0" not in server.get("/metrics").text:
        assert time.monotonic() - left < 1
    answer = server.post("/generate", {"max_new_tokens": 2}).json()
    assert answer["timings"]["queue_seconds"] < 0.5


def test_a_streamed_report_is_the_report(server: Server) -> None:
    body = {"audio": as_base64(song(4)), "sections": SECTIONS, "seed": 3}
    whole = server.post("/full_report", body).json()
    with streamed(server.url + "/full_report", body) as stream:
        events = list(stream)
    sections = answers_of(events)
    assert events[-1].name == "done"
    totals = events[-1].data
    assert totals["report"] == whole["report"]
    assert totals.keys() == whole.keys() - {"sections"}
    assert [said(section) for section in sections] == [
        said(section) for section in whole["sections"]
    ]
    assert [section["preset"] for section in sections] == SECTIONS
    assert texts(events) == {
        index: section["response"] for index, section in enumerate(whole["sections"])
    }
