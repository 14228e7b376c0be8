"""A request's body: what is read, what is refused by name, and what is left behind (nothing)."""

import asyncio
import base64
import json
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import jsonschema
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adapter import body
from adapter.body import add_request_schemas, openapi_request_body, parse_json, read_body
from adapter.errors import AdapterError, TooLargeError, UnprocessableError
from adapter.schemas import request_models
from adapter.settings import Settings

MAX_JSON_BYTES = 4096
MAX_AUDIO_BYTES = 100_000
JSON = {"content-type": "application/json"}


async def echo(request: Request) -> Response:
    value, upload = await read_body(
        request, max_json_bytes=MAX_JSON_BYTES, max_audio_bytes=MAX_AUDIO_BYTES
    )
    if upload is None:
        return JSONResponse({"value": value, "audio": None})
    with upload:
        return JSONResponse({"value": value, "audio": base64.b64encode(upload.read()).decode()})


async def show_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, AdapterError)
    sent = {"code": error.code, "message": error.message, "field": error.field}
    return JSONResponse({"error": sent}, status_code=error.status)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(
        routes=[Route("/", echo, methods=["POST"])], exception_handlers={AdapterError: show_error}
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        yield client


@pytest.fixture(autouse=True)
def uploads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[BinaryIO]]:
    """The temporary files that were made; none may be open, or have a name, after a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: list[BinaryIO] = []
    make = tempfile.TemporaryFile

    def recorded() -> Any:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", recorded)
    yield made
    assert all(upload.closed for upload in made)
    assert list(tmp_path.iterdir()) == []


def refusal(text: str | bytes) -> UnprocessableError:
    with pytest.raises(UnprocessableError) as caught:
        parse_json(text.encode() if isinstance(text, str) else text)
    caught.value.message.encode()
    return caught.value


# JSON


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(10**60), max_value=10**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_values, st.booleans())
def test_strict_json_is_read_as_json_reads_it(value: object, ensure_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ensure_ascii).encode()
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ('{"a": 1, "a": 2}', "duplicate_field", "a"),
        ('{"prompts": [{}, {"top_p": 1, "top_p": 1}]}', "duplicate_field", "prompts.1.top_p"),
        ('{"a": 1, "\\u0061": 2}', "duplicate_field", "a"),
        ('{"top_p": NaN}', "invalid_value", "top_p"),
        ('{"prompts": [{}, {}, {}, {"top_p": Infinity}]}', "invalid_value", "prompts.3.top_p"),
        ('{"a": [[-Infinity]]}', "invalid_value", "a.0.0"),
        ('{"a": 1e400}', "invalid_value", "a"),
        ('{"a": -1e400}', "invalid_value", "a"),
        ('{"a": ' + "9" * 65 + "}", "invalid_value", "a"),
        ('{"a": ' + "9" * 100_000 + "}", "invalid_value", "a"),
        ('{"prompt": "\\ud800"}', "invalid_value", "prompt"),
        ('{"prompt": "x\\udc00é"}', "invalid_value", "prompt"),
        ('{"a": {"\\ud800": 1}}', "invalid_value", "a.\\ud800"),
        ("NaN", "invalid_value", None),
    ],
)
def test_a_value_that_is_no_strict_json_is_refused_by_its_path(
    text: str, code: str, field: str | None
) -> None:
    error = refusal(text)
    assert (error.code, error.field) == (code, field)
    assert error.message.startswith(field or "The body")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"   ",
        b"{",
        b'{"a": 1}}',
        b'{"a": 1} {"b": 2}',
        b'{"a": 1,}',
        b"{'a': 1}",
        b'{"a": 01}',
        b'{"a": "line\nbreak"}',
        b'{"a": .5}',
        b"hello",
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        '{"a": 1}'.encode("utf-16"),
    ],
)
def test_a_text_that_is_no_json_is_refused(text: bytes) -> None:
    error = refusal(text)
    assert (error.code, error.field) == ("invalid_json", None)


def test_a_syntax_error_is_told_its_line_and_column() -> None:
    assert "line 2, column 8" in refusal('{"a": 1,\n  "b": }').message


@pytest.mark.parametrize(
    "text", ['{"a": "\\ud834\\udd1e"}', '{"a": "\\u0000\\u202e"}', '{"a":1.0}']
)
def test_valid_unicode_and_numbers_are_taken(text: str) -> None:
    assert parse_json(text.encode()) == json.loads(text)


def test_64_levels_are_taken_and_65_are_refused() -> None:
    assert parse_json(b"[" * 64 + b"]" * 64)
    assert refusal("[" * 65 + "]" * 65).code == "too_deep"
    assert refusal('{"a":' * 65 + "1" + "}" * 65).code == "too_deep"


def test_nesting_beyond_the_recursion_limit_is_refused() -> None:
    assert refusal("[" * 90_000 + "]" * 90_000).code == "too_deep"


def test_a_body_of_very_many_values_is_refused_before_it_is_parsed() -> None:
    for text in ("[" + "1," * 100_001 + "1]", "[" + '"",' * 300_000 + "1]"):
        assert refusal(text).code == "too_complex"


def test_commas_and_brackets_inside_strings_are_no_values() -> None:
    batch = {"prompts": [{"prompt": r'"\,[{' * 4800}] * 64}
    assert parse_json(json.dumps(batch).encode()) == batch


def test_a_message_about_a_long_key_is_short() -> None:
    error = refusal(json.dumps({"k" * 100_000: 1})[:-2] + "NaN}")
    assert len(error.message) < 200


@pytest.fixture
def songs_of_four_bytes_are_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "LIFT_BYTES", 4)


def outcome(text: bytes) -> object:
    try:
        return parse_json(text)
    except UnprocessableError as error:
        return error.code, error.field


fragments = st.sampled_from(
    [*'"audio,:{}[] \\x', '"audio":"', '"audio" : "', '\\"audio":"', "AAAAAAAA", '{"', '"}', '",']
)


@given(st.lists(fragments, max_size=12).map("".join))
def test_reading_songs_past_the_scanner_changes_no_outcome(inner: str) -> None:
    texts = [inner.encode(), f'{{"audio":"AAAAAAAA","b":{{{inner}}}}}'.encode()]
    plainly = [outcome(text) for text in texts]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(body, "LIFT_BYTES", 4)
        assert [outcome(text) for text in texts] == plainly


@pytest.mark.usefixtures("songs_of_four_bytes_are_lifted")
@pytest.mark.parametrize(
    "text",
    [
        r'{"say \"audio": "AAAAAAAA", "prompt": "\"audio\": \"AAAAAAAA\""}',
        '{"prompts": [{"audio": "AAAAAAAA"}, {"audio" \n:\t"BBBBBBBB"}], "audio": "CCCCCCCC"}',
        r'{"audio": "AA\/AAAAAA"}',
        '{"audio": "ÄÄÄÄÄÄÄÄ"}',
        '{"audio": ["AAAAAAAA"]}',
    ],
)
def test_every_song_comes_back_in_its_place(text: str) -> None:
    assert parse_json(text.encode()) == json.loads(text)


@pytest.mark.usefixtures("songs_of_four_bytes_are_lifted")
@pytest.mark.parametrize(
    "text", [b'{"audio": "AAAA\nAAAA"}', b'{"audio": "AAAA\xffAAA"}', b'{"audio": "AAAAAAAA']
)
def test_a_song_that_is_no_json_string_is_refused(text: bytes) -> None:
    assert refusal(text).code == "invalid_json"


async def test_a_large_body_is_parsed_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def parse(text: bytearray) -> object:
        threads.append(threading.current_thread())
        return parse_json(text)

    monkeypatch.setattr(body, "parse_json", parse)
    for size in (10, body.THREAD_BYTES + 1):
        chunks = [b'{"a": "', b"x" * size, b'"}']
        value, _ = await read(chunks, JSON, max_json_bytes=10**6)
        assert value == {"a": "x" * size}
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


# HTTP


async def read(
    chunks: Any,
    headers: dict[str, str],
    *,
    max_json_bytes: int = MAX_JSON_BYTES,
    max_audio_bytes: int = MAX_AUDIO_BYTES,
) -> tuple[object, BinaryIO | None]:
    """Read a body that arrives in these chunks; None is the client leaving."""

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        chunk = chunks.pop(0)
        if chunk is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    request = Request({"type": "http", "method": "POST", "headers": raw}, receive)
    return await read_body(request, max_json_bytes=max_json_bytes, max_audio_bytes=max_audio_bytes)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=UTF-8"])
async def test_a_json_body_is_read(client: httpx.AsyncClient, content_type: str) -> None:
    response = await client.post(
        "/", content='{"prompt": "é"}', headers={"content-type": content_type}
    )
    assert response.json() == {"value": {"prompt": "é"}, "audio": None}


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/jsonp",
        "multipart/mixed; boundary=x",
        "application/json; charset=utf-16",
    ],
)
async def test_another_content_type_is_a_415(client: httpx.AsyncClient, content_type: str) -> None:
    response = await client.post("/", content="{}", headers={"content-type": content_type})
    error = error_of(response, 415)
    assert error["code"] == "unsupported_media_type"
    assert "application/json" in error["message"]


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=x"])
async def test_a_compressed_body_is_a_415(client: httpx.AsyncClient, content_type: str) -> None:
    headers = {"content-type": content_type, "content-encoding": "gzip"}
    error = error_of(await client.post("/", content=b"\x1f\x8b", headers=headers), 415)
    assert "uncompressed" in error["message"]


async def test_a_declared_length_above_the_limit_is_refused_unread() -> None:
    unread: list[bytes | None] = [b"{}"]
    with pytest.raises(TooLargeError):
        await read(unread, {**JSON, "content-length": str(MAX_JSON_BYTES + 1)})
    assert unread == [b"{}"]


async def test_a_body_without_a_length_is_cut_off_at_the_limit() -> None:
    chunks: list[bytes | None] = [b" " * 1000] * 100
    with pytest.raises(TooLargeError) as caught:
        await read(chunks, JSON)
    assert len(chunks) == 95
    assert caught.value.status == 413
    assert str(MAX_JSON_BYTES) in caught.value.message


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_of_exactly_the_limit_is_read(declared: bool) -> None:
    for size, refused in ((MAX_JSON_BYTES, False), (MAX_JSON_BYTES + 1, True)):
        headers = {**JSON, "content-length": str(size)} if declared else JSON
        reading = read([b"{}".ljust(size)], headers)
        if refused:
            with pytest.raises(TooLargeError):
                await reading
        else:
            assert await reading == ({}, None)


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=x"])
async def test_a_client_that_leaves_ends_the_reading(content_type: str) -> None:
    chunks = [multipart(("audio", b"x" * 100))[:-20], None]
    with pytest.raises(ClientDisconnect):
        await read(chunks, {"content-type": content_type})


# Multipart

FORM = {"content-type": "multipart/form-data; boundary=x"}


def multipart(*parts: tuple[str, bytes], headers: bytes = b"") -> bytes:
    written = [
        b'--x\r\nContent-Disposition: form-data; name="%s"\r\n%s\r\n%s\r\n'
        % (name.encode(), headers, data)
        for name, data in parts
    ]
    return b"".join(written) + b"--x--\r\n"


REQUEST = ("request", b'{"prompt": "x"}')
AUDIO = ("audio", b"RIFF\r\n--\0\xff")


@pytest.mark.parametrize("parts", [(REQUEST, AUDIO), (AUDIO, REQUEST)])
async def test_both_parts_are_read_in_either_order(parts: Any) -> None:
    value, upload = await read([multipart(*parts)], FORM)
    assert value == {"prompt": "x"}
    assert upload is not None
    with upload:
        assert upload.read() == AUDIO[1]
        assert isinstance(upload.name, int), "the file has no name on disk"


async def test_parts_are_read_however_they_are_cut_into_chunks() -> None:
    content = multipart(REQUEST, AUDIO)
    for size in range(1, len(content)):
        chunks = [content[at : at + size] for at in range(0, len(content), size)]
        value, upload = await read(list(chunks), FORM)
        assert upload is not None
        with upload:
            assert (value, upload.read()) == ({"prompt": "x"}, AUDIO[1])


async def test_a_song_of_several_writes_is_whole() -> None:
    song = bytes(range(256)) * 20_000
    content = multipart(REQUEST, ("audio", song))
    chunks: list[bytes | None] = [
        content[at : at + 65_536] for at in range(0, len(content), 65_536)
    ]
    _, upload = await read(chunks, FORM, max_audio_bytes=len(song))
    assert upload is not None
    with upload:
        assert upload.read() == song


async def test_what_an_ordinary_client_sends_is_read(client: httpx.AsyncClient) -> None:
    files = {
        "request": (None, b'{"prompt": "x"}', "application/json"),
        "audio": ("my song.mp3", b"ID3", "audio/mpeg"),
    }
    response = await client.post("/", files=files)
    assert response.json() == {"value": {"prompt": "x"}, "audio": "SUQz"}


async def test_a_form_without_audio_is_a_text_only_request(client: httpx.AsyncClient) -> None:
    response = await client.post("/", content=multipart(REQUEST), headers=FORM)
    assert response.json() == {"value": {"prompt": "x"}, "audio": None}


async def test_an_empty_file_is_still_a_file(client: httpx.AsyncClient) -> None:
    response = await client.post("/", content=multipart(REQUEST, ("audio", b"")), headers=FORM)
    assert response.json()["audio"] == ""


@pytest.mark.parametrize(
    ("content", "code", "field"),
    [
        (multipart(AUDIO), "missing_field", "request"),
        (multipart(), "missing_field", "request"),
        (multipart(REQUEST, ("song", b"x")), "unknown_field", "song"),
        (multipart(REQUEST, ("", b"x")), "unknown_field", None),
        (multipart(REQUEST, REQUEST), "duplicate_field", "request"),
        (multipart(REQUEST, AUDIO, AUDIO), "duplicate_field", "audio"),
        (multipart(AUDIO, ("request", b"{")), "invalid_json", None),
        (multipart(AUDIO, ("request", b'{"a": NaN}')), "invalid_value", "a"),
        (
            multipart(AUDIO, headers=b"Content-Transfer-Encoding: base64\r\n"),
            "invalid_value",
            "audio",
        ),
        (multipart(REQUEST, AUDIO)[:-8], "invalid_multipart", None),
        (b"", "invalid_multipart", None),
        (b"--y\r\n\r\n", "invalid_multipart", None),
        (b"--x\r\nno header\r\n\r\n", "invalid_multipart", None),
        (b"--x\r\n" + b"A: b\r\n" * 1000, "invalid_multipart", None),
    ],
)
async def test_a_form_at_fault_is_a_422_that_names_the_part(
    client: httpx.AsyncClient, content: bytes, code: str, field: str | None
) -> None:
    error = error_of(await client.post("/", content=content, headers=FORM), 422)
    assert (error["code"], error["field"]) == (code, field)


@pytest.mark.parametrize("boundary", ["", "; boundary=", f"; boundary={'x' * 300}"])
async def test_a_form_without_a_usable_boundary_is_a_422(
    client: httpx.AsyncClient, boundary: str
) -> None:
    headers = {"content-type": f"multipart/form-data{boundary}"}
    error = error_of(await client.post("/", content=multipart(REQUEST), headers=headers), 422)
    assert error["code"] == "invalid_multipart"


@pytest.mark.parametrize(
    ("name", "limit"), [("audio", MAX_AUDIO_BYTES), ("request", MAX_JSON_BYTES)]
)
async def test_a_part_above_its_limit_is_a_413_found_while_reading(name: str, limit: int) -> None:
    content = multipart((name, b" " * (limit + 5000)))
    chunks: list[bytes | None] = [content[at : at + 1000] for at in range(0, len(content), 1000)]
    with pytest.raises(TooLargeError) as caught:
        await read(chunks, FORM)
    assert caught.value.field == name
    assert len(chunks) >= 4


async def test_bytes_around_the_parts_are_limited_too() -> None:
    limit = MAX_JSON_BYTES + MAX_AUDIO_BYTES + body.MULTIPART_OVERHEAD_BYTES
    chunks: list[bytes | None] = [multipart(REQUEST), *[b" " * 10_000] * (limit // 10_000 + 5)]
    with pytest.raises(TooLargeError):
        await read(chunks, FORM)
    assert chunks


async def test_a_file_within_limits_is_closed_when_the_form_fails(uploads: list[BinaryIO]) -> None:
    with pytest.raises(UnprocessableError):
        await read([multipart(AUDIO, ("song", b""))], FORM)
    assert [upload.closed for upload in uploads] == [True]


async def test_a_cancelled_upload_closes_its_file(uploads: list[BinaryIO]) -> None:
    async def stalled() -> dict[str, Any]:
        if not started.is_set():
            started.set()
            return {"type": "http.request", "body": multipart(AUDIO)[:-10], "more_body": True}
        return await asyncio.Future()

    started = asyncio.Event()
    raw = [(b"content-type", b"multipart/form-data; boundary=x")]
    request = Request({"type": "http", "method": "POST", "headers": raw}, stalled)
    reading = asyncio.create_task(read_body(request, max_json_bytes=9999, max_audio_bytes=9999))
    await started.wait()
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert [upload.closed for upload in uploads] == [True]


# OpenAPI


@pytest.fixture
def document() -> dict[str, Any]:
    models = request_models(Settings(max_prompts=3))
    app = FastAPI()

    @app.post("/generate", openapi_extra=openapi_request_body(models.generate))
    async def generate(request: Request) -> None: ...

    @app.post("/generate_batch", openapi_extra=openapi_request_body(models.generate_batch))
    async def generate_batch(request: Request) -> None: ...

    document = app.openapi()
    add_request_schemas(document, [models.generate, models.generate_batch])
    return document


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        yield from [node["$ref"]] if "$ref" in node else []
        node = list(node.values())
    for child in node if isinstance(node, list) else []:
        yield from references(child)


def test_every_reference_of_the_document_resolves(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    found = set(references(document))
    assert "#/components/schemas/BatchPrompt" in found
    for reference in found:
        node: Any = document
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]


def test_the_documents_schemas_are_valid_and_show_the_maxima(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert schemas["GenerateBatchRequest"]["properties"]["prompts"]["maxItems"] == 3


@pytest.mark.parametrize("path", ["/generate", "/generate_batch"])
def test_each_route_documents_json_and_a_form(document: dict[str, Any], path: str) -> None:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    assert content.keys() == {"application/json", "multipart/form-data"}
    form = content["multipart/form-data"]["schema"]
    assert form["properties"].keys() == {"request", "audio"}
    assert form["required"] == ["request"]
    assert form["properties"]["request"] == content["application/json"]["schema"]


@pytest.mark.parametrize("path", ["/generate", "/generate_batch"])
def test_each_routes_examples_are_valid(document: dict[str, Any], path: str) -> None:
    media = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    validator = jsonschema.Draft202012Validator({**document, **media["schema"]})
    assert media["examples"].keys() == {"text", "song"}
    for example in media["examples"].values():
        validator.validate(example["value"])
    assert "audio_url" not in media["examples"]["text"]["value"]


def test_a_body_of_a_million_audio_keys_is_refused_quickly() -> None:
    body = b'{"audio":"x"' + b',"audio":"y"' * 1_000_000 + b"}"
    started = time.monotonic()
    with pytest.raises(UnprocessableError, match="values"):
        parse_json(body)
    assert time.monotonic() - started < 2
