"""Bad input gets an error that names the field and says what to do, and the server goes on."""

import base64
import string
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server import Server, free_port
from tests.wire.audio import as_base64, silence, song


@pytest.fixture(autouse=True)
def still_answers(server: Server) -> Iterator[None]:
    yield
    assert server.post("/generate", {"max_new_tokens": 1}).status_code == 200


def refused(response: httpx.Response, status: int, code: str, field: str | None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["field"]) == (code, field)
    assert len(error["message"]) > 20


def five_prompts(**third: Any) -> dict[str, Any]:
    prompts: list[dict[str, Any]] = [{"max_new_tokens": 2} for _ in range(5)]
    prompts[3] |= third
    return {"prompts": prompts}


def text_file() -> str:
    return base64.b64encode(b"These are words, not music.\n" * 50).decode()


def test_a_body_that_is_no_json(server: Server) -> None:
    response = httpx.post(
        server.url + "/generate", content=b"{no", headers={"Content-Type": "application/json"}
    )
    refused(response, 422, "invalid_json", None)


@pytest.mark.parametrize(
    ("fault", "code", "field"),
    [
        ({"top_p": 1.5}, "invalid_value", "prompts.3.top_p"),
        ({"temperature": -1}, "invalid_value", "prompts.3.temperature"),
        ({"max_new_tokens": 0}, "invalid_value", "prompts.3.max_new_tokens"),
        ({"max_new_tokens": "64"}, "invalid_value", "prompts.3.max_new_tokens"),
        ({"do_sample": "yes"}, "invalid_value", "prompts.3.do_sample"),
        ({"prompt": ""}, "invalid_value", "prompts.3.prompt"),
        ({"seed": -1}, "invalid_value", "prompts.3.seed"),
        ({"repetition_penalty": 0}, "invalid_value", "prompts.3.repetition_penalty"),
        ({"top_k": 5}, "unknown_field", "prompts.3.top_k"),
        ({"stream": True}, "unknown_field", "prompts.3.stream"),
        ({"audio_url": ["a", "b"]}, "invalid_value", "prompts.3.audio_url"),
        ({"start_seconds": 1}, "moment_without_audio", "prompts.3.start_seconds"),
    ],
)
def test_a_fault_in_one_prompt_names_its_place(
    server: Server, fault: dict[str, Any], code: str, field: str
) -> None:
    refused(server.post("/generate_batch", five_prompts(**fault)), 422, code, field)


def test_an_unknown_field_of_the_batch(server: Server) -> None:
    body = {"prompts": [{}], "group_sice": 3}
    response = server.post("/generate_batch", body)
    refused(response, 422, "unknown_field", "group_sice")
    assert "group_size" in response.json()["error"]["message"]


@pytest.mark.parametrize("group_size", [0, 9])
def test_a_group_size_out_of_range(server: Server, group_size: int) -> None:
    body = {"prompts": [{}], "group_size": group_size}
    refused(server.post("/generate_batch", body), 422, "invalid_value", "group_size")


def test_more_prompts_than_a_batch_may_have(server: Server) -> None:
    body = {"prompts": [{}] * 65}
    refused(server.post("/generate_batch", body), 422, "invalid_value", "prompts")


@pytest.mark.parametrize("path", ["/generate", "/generate_batch"])
def test_a_text_file_as_the_song(server: Server, path: str) -> None:
    body: dict[str, Any] = {"audio": text_file()}
    if path == "/generate_batch":
        body["prompts"] = [{}, {}]
    refused(server.post(path, body), 415, "not_audio", "audio")


def test_an_empty_file_as_the_song(server: Server) -> None:
    response = httpx.post(
        server.url + "/generate",
        files={"request": (None, "{}", "application/json"), "audio": ("song.mp3", b"")},
        timeout=60,
    )
    refused(response, 415, "not_audio", "audio")


def test_a_song_shorter_than_one_audio_token(server: Server) -> None:
    body = {"audio": as_base64(song(0.02))}
    refused(server.post("/generate", body), 422, "audio_too_short", "audio")


def test_a_shared_song_shorter_than_one_audio_token_fails_the_batch(server: Server) -> None:
    body = {"audio": as_base64(song(0.02)), "prompts": [{}, {}]}
    refused(server.post("/generate_batch", body), 422, "audio_too_short", "audio")


def test_a_moment_shorter_than_one_audio_token_names_the_moment(server: Server) -> None:
    body = {"audio": as_base64(song(2)), "start_seconds": 1, "end_seconds": 1}
    refused(server.post("/generate", body), 422, "audio_too_short", "end_seconds")


def test_a_song_longer_than_is_allowed(server: Server) -> None:
    body = {"audio": silence(3601)}
    refused(server.post("/generate", body), 422, "audio_too_long", "audio")


def test_a_prompt_that_does_not_fit_the_context(server: Server) -> None:
    noise = (string.printable * 300)[:24_000]
    body = {"prompt": noise, "audio": silence(1190), "max_new_tokens": 2}
    refused(server.post("/generate", body), 422, "prompt_too_long", "prompt")


def test_a_url_that_nobody_answers(server: Server) -> None:
    url = "http://does-not-exist.invalid/song.mp3"
    refused(server.post("/generate", {"audio_url": url}), 502, "audio_unavailable", "audio_url")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "10.0.0.1", "169.254.169.254", "0.0.0.0"]
)
def test_a_url_of_a_private_address(server: Server, host: str) -> None:
    port = server.url.rsplit(":", 1)[1]
    for suffix in ("", f":{port}"):
        response = server.post("/generate", {"audio_url": f"http://{host}{suffix}/health"})
        refused(response, 422, "url_not_allowed", "audio_url")


def test_a_body_larger_than_its_limit(server: Server) -> None:
    response = httpx.post(
        server.url + "/generate",
        content=b'{"audio": "' + b"A" * (64 * 2**20) + b'"}',
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    refused(response, 413, "too_large", None)


def test_two_sources_of_one_song(server: Server) -> None:
    body = {"audio": as_base64(song(1)), "audio_url": "https://example.com/song.mp3"}
    refused(server.post("/generate", body), 422, "invalid_value", "audio")


def test_a_path_that_does_not_exist(server: Server) -> None:
    refused(server.get("/nothing/here"), 404, "not_found", None)


def test_a_method_that_a_path_does_not_take(server: Server) -> None:
    response = server.get("/generate")
    refused(response, 405, "method_not_allowed", None)
    assert response.headers["allow"] == "POST"


def test_a_port_with_nobody_behind_it_is_still_refused_by_its_address(server: Server) -> None:
    url = f"http://127.0.0.1:{free_port()}/song.mp3"
    refused(server.post("/generate", {"audio_url": url}), 422, "url_not_allowed", "audio_url")
