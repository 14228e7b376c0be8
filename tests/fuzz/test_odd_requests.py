"""Texts, JSON, headers and bytes that no client should send: never a fault, never a hang."""

import json
import random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.bodies import RAW_REQUESTS, odd_request
from tests.fuzz.sockets import SONG_PATHS, send_raw
from tests.fuzz.traffic import Request, Tally, fault, json_request, send_all
from tests.server import Server

FUZZING = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def post(server: Server, content: bytes, content_type: str = "application/json") -> httpx.Response:
    headers = {"Content-Type": content_type}
    return httpx.post(server.url + "/generate", content=content, headers=headers, timeout=60)


@FUZZING
@given(prompt=st.text(min_size=1, max_size=200), escaped=st.booleans())
def test_any_valid_unicode_is_answered(fuzzed: Server, prompt: str, escaped: bool) -> None:
    response = post(fuzzed, json.dumps({"prompt": prompt}, ensure_ascii=escaped).encode())
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "prompt",
    [
        *("\x00", "a\x00b", "\u202eabc\u202c", "\u200f\u200e\u061c", "\ufeff", "\ufffe\uffff"),
        *(
            "e" + "\u0301" * 1000,
            "\u0301",
            "👩‍👩‍👧‍👦" * 50,
            "\U0010ffff",
            "\x1b[2J",
            "\r\n" * 50,
            "\u2028",
        ),
    ],
    ids=ascii,
)
def test_odd_but_valid_unicode_is_answered(fuzzed: Server, prompt: str) -> None:
    assert post(fuzzed, json.dumps({"prompt": prompt}).encode()).status_code == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"temperature": NaN}', "temperature"),
        (b'{"temperature": -Infinity}', "temperature"),
        (b'{"temperature": 1e400}', "temperature"),
        (b'{"temperature": true}', "temperature"),
        (b'{"max_new_tokens": true}', "max_new_tokens"),
        (b'{"top_p": "1"}', "top_p"),
        (b'{"do_sample": 1}', "do_sample"),
        (b'{"prompt": "a", "prompt": "b"}', "prompt"),
        (b'{"prompt": "a", "pr\\u006fmpt": "b"}', "prompt"),
        (b'{"seed": 9223372036854775808}', "seed"),
        (b'{"prompt": "\xed\xa0\x80"}', None),
        (b"[" * 100_000, None),
        (b"", None),
        (b"null", None),
    ],
)
def test_json_that_is_not_strict_is_a_422_that_names_the_field(
    fuzzed: Server, body: bytes, field: str | None
) -> None:
    response = post(fuzzed, body)
    assert response.status_code == 422
    assert response.json()["error"]["field"] == field


@pytest.mark.parametrize("content_type", ["text/plain", "application/json; charset=utf-16", ""])
def test_another_content_type_is_a_415_on_the_wire(fuzzed: Server, content_type: str) -> None:
    response = post(fuzzed, b"{}", content_type)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


async def test_hundreds_of_odd_requests_meet_no_fault(fuzzed: Server, song_port: int) -> None:
    rng = random.Random(0)
    urls = tuple(f"http://127.0.0.1:{song_port}{path}" for path in SONG_PATHS)
    tally = Tally()
    await send_all(fuzzed.url, (odd_request(rng, urls) for _ in range(600)), tally)
    assert tally.faults == []
    assert tally.num_requests == 600


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *(("/opus", 200), ("/redirect", 200), ("/loop", 502), ("/away", 422), ("/cut", 502)),
        *(("/huge", 413), ("/gzip", 502), ("/missing", 502), ("/empty", 415), ("/garbage", 415)),
    ],
)
def test_a_url_that_misbehaves_is_told_by_its_status(
    fuzzed: Server, song_port: int, path: str, status: int
) -> None:
    request = json_request("/generate", {"audio_url": f"http://127.0.0.1:{song_port}{path}"})
    response = post(fuzzed, request.content)
    assert response.status_code == status, response.text
    assert fault(request, response) is None


async def test_bytes_that_are_no_http_end_in_an_answer_or_a_closed_connection(
    fuzzed: Server,
) -> None:
    tally = Tally()
    await send_raw(fuzzed, RAW_REQUESTS, tally)
    assert tally.faults == []


def test_a_path_with_a_slash_too_many_is_not_there(fuzzed: Server) -> None:
    response = httpx.post(fuzzed.url + "/generate/", json={})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("path", ["/health", "/live", "/metrics", "/openapi.json"])
def test_head_is_answered_where_get_is(fuzzed: Server, path: str) -> None:
    response = httpx.head(fuzzed.url + path)
    assert (response.status_code, response.content) == (200, b"")


def test_a_405_names_all_methods_of_the_path(fuzzed: Server) -> None:
    response = httpx.post(fuzzed.url + "/health")
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("status", "headers", "content", "wrong"),
    [
        (500, {"x-request-id": "a"}, b"{}", "status 500"),
        (307, {"x-request-id": "a"}, b"{}", "status 307"),
        (422, {"x-request-id": "a"}, b"oops", "no ErrorResponse"),
        (200, {"x-request-id": "a"}, b'{"response": "a"}', "no Answer"),
        (422, {}, b'{"error": {"code": "a", "message": "b", "field": null}}', "no X-Request-Id"),
        (503, {"x-request-id": "a"}, b"{}", "a 503 without Retry-After"),
        (503, {"retry-after": "5"}, b'{"code":"engine_dead"}', "status 503 with engine_dead"),
        (200, {}, b'{"error":{"code":"internal_error"}}', "status 200 with internal_error"),
    ],
)
def test_a_fault_is_seen(status: int, headers: Any, content: bytes, wrong: str) -> None:
    response = httpx.Response(status, headers=headers, content=content)
    found = fault(Request("POST", "/generate", (), b""), response)
    assert found is not None and found.startswith(wrong)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_only_what_asks_for_answers_may_be_unavailable(status: int) -> None:
    assert fault(Request("GET", "/live", (), b""), httpx.Response(status)) == f"status {status}"
