"""A request's body: strict JSON, or multipart with the JSON and an audio file, inside limits.

Sizes are enforced while reading, so a body without Content-Length is cut off just the same.
"""

import asyncio
import json
import re
import secrets
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from adapter.errors import NotAudioError, TooLargeError, UnprocessableError
from adapter.schemas import field_path, show

MAX_DEPTH = 64  # containers inside each other
MAX_VALUES = 100_000  # a small text can hold millions, each an object of Python's
MAX_INTEGER_DIGITS = 64
THREAD_BYTES = 256 * 1024  # a larger body is parsed off the event loop
MAX_LIFTED = 1000  # more "audio" than a batch has prompts is no body worth the search
LIFT_BYTES = 2**20  # a longer song in base64 goes round json's scanner
WRITE_BYTES = 2**20  # uploads are written to disk in pieces of this size
MULTIPART_OVERHEAD_BYTES = 64 * 1024  # boundaries, part headers, what stands around the parts

JSON_TYPE = "application/json"
MULTIPART_TYPE = "multipart/form-data"

_AUDIO_KEY = b'"audio"'
_VALUE_START = re.compile(rb'\s*:\s*"')
_NOT_PLAIN = re.compile(rb"[^ !#-\[\]-~]")


async def read_body(
    request: Request, *, max_json_bytes: int, max_audio_bytes: int
) -> tuple[object, BinaryIO | None]:
    """The request's JSON value and its uploaded file, which the caller closes; chosen by type.

    Raises UnprocessableError (no strict JSON, broken multipart), TooLargeError, and NotAudioError
    of code `unsupported_media_type`; starlette's ClientDisconnect passes through.
    """
    content_type, _ = _content_type(request)
    if content_type == MULTIPART_TYPE:
        return await read_multipart(
            request, max_json_bytes=max_json_bytes, max_audio_bytes=max_audio_bytes
        )
    return await read_json(request, max_bytes=max_json_bytes), None


async def read_json(request: Request, *, max_bytes: int) -> object:
    """The JSON value of an `application/json` body of at most `max_bytes`."""
    content_type, options = _content_type(request)
    _refuse_encoded(request)
    if content_type != JSON_TYPE:
        _refuse_type(content_type)
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8", b"us-ascii"):
        _refuse_type(request.headers["content-type"])
    body = bytearray()
    async with aclosing(_limited_stream(request, max_bytes)) as chunks:
        async for chunk in chunks:
            body += chunk
    return await _parse_off_loop(body)


async def read_multipart(
    request: Request, *, max_json_bytes: int, max_audio_bytes: int
) -> tuple[object, BinaryIO | None]:
    """The JSON value of part `request` and the file of part `audio`, or None where it is not sent.

    The file is unnamed, stands at its start, and is the caller's to close; on every failure it is
    closed here.
    """
    _, options = _content_type(request)
    _refuse_encoded(request)
    max_bytes = max_json_bytes + max_audio_bytes + MULTIPART_OVERHEAD_BYTES
    with ExitStack() as stack:
        upload = stack.enter_context(tempfile.TemporaryFile())
        parts = _Parts(max_json_bytes=max_json_bytes, max_audio_bytes=max_audio_bytes)
        async with aclosing(_limited_stream(request, max_bytes)) as chunks:
            await _feed(parts, chunks, options.get(b"boundary", b""), upload)
        obj = await _parse_off_loop(parts.json)
        if "audio" not in parts.seen:
            return obj, None
        stack.pop_all()
        upload.seek(0)
        return obj, upload


def _content_type(request: Request) -> tuple[str, dict[bytes, bytes]]:
    content_type, options = parse_options_header(request.headers.get("content-type"))
    return content_type.decode("latin-1"), options


def _refuse_type(content_type: str) -> NoReturn:
    raise NotAudioError(
        f"The Content-Type is {show(content_type)}; send {JSON_TYPE} in UTF-8, or "
        f"{MULTIPART_TYPE} with the parts 'request' and 'audio'.",
        code="unsupported_media_type",
    )


def _refuse_encoded(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise NotAudioError(
            f"The Content-Encoding is {show(encoding)}; send the body as it is, uncompressed.",
            code="unsupported_media_type",
        )


async def _limited_stream(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    declared = request.headers.get("content-length", "")
    if re.fullmatch("[0-9]{1,18}", declared) and int(declared) > max_bytes:
        raise _too_large(None, max_bytes)
    received_bytes = 0
    async for chunk in request.stream():
        received_bytes += len(chunk)
        if received_bytes > max_bytes:
            raise _too_large(None, max_bytes)
        yield chunk


def _too_large(part: str | None, max_bytes: int) -> TooLargeError:
    subject = f"The part '{part}'" if part else "The body"
    advice = f"send the song as part 'audio' of {MULTIPART_TYPE}, or give its audio_url"
    if part == "audio":
        advice = "send a shorter or a more compressed song"
    return TooLargeError(f"{subject} is larger than {max_bytes} bytes; {advice}.", field=part)


# Multipart


@dataclass
class _Parts:
    """What python-multipart's callbacks collect: part `request`, and part `audio`'s next bytes."""

    max_json_bytes: int
    max_audio_bytes: int
    json: bytearray = field(default_factory=bytearray)
    pending: bytearray = field(default_factory=bytearray)
    seen: set[str] = field(default_factory=set)
    complete: bool = False
    _audio_bytes: int = 0
    _current: str = ""
    _header_name: bytes = b""
    _header_value: bytes = b""
    _headers: dict[bytes, bytes] = field(default_factory=dict)

    def on_part_begin(self) -> None:
        self._headers = {}

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def on_header_end(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name not in ("request", "audio"):
            _refuse_part(name, "is unknown; the parts are 'request' and 'audio'", "unknown_field")
        if name in self.seen:
            _refuse_part(name, "is there twice; send it once", "duplicate_field")
        encoding = self._headers.get(b"content-transfer-encoding", b"binary").lower()
        if encoding not in (b"binary", b"8bit", b"7bit"):
            _refuse_part(name, "has a Content-Transfer-Encoding; send its bytes", "invalid_value")
        self.seen.add(name)
        self._current = name

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._current == "request":
            self._add_json(data[start:end])
        else:
            self._add_audio(data[start:end])

    def on_end(self) -> None:
        self.complete = True

    def _add_json(self, data: bytes) -> None:
        self.json += data
        if len(self.json) > self.max_json_bytes:
            raise _too_large("request", self.max_json_bytes)

    def _add_audio(self, data: bytes) -> None:
        self.pending += data
        self._audio_bytes += len(data)
        if self._audio_bytes > self.max_audio_bytes:
            raise _too_large("audio", self.max_audio_bytes)


def _refuse_part(name: str, why: str, code: str) -> NoReturn:
    raise UnprocessableError(
        f"The part {show(name)} {why}.", code=code, field=field_path([name]) or None
    )


async def _feed(
    parts: _Parts, chunks: AsyncIterator[bytes], boundary: bytes, upload: BinaryIO
) -> None:
    if not boundary:
        raise _broken("its Content-Type names no boundary")
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": parts.on_part_begin,
                "on_part_data": parts.on_part_data,
                "on_header_field": parts.on_header_field,
                "on_header_value": parts.on_header_value,
                "on_header_end": parts.on_header_end,
                "on_headers_finished": parts.on_headers_finished,
                "on_end": parts.on_end,
            },
        )
        async for chunk in chunks:
            parser.write(chunk)
            await _write_pending(parts, upload, at_least=WRITE_BYTES)
    except FormParserError as error:
        raise _broken(str(error)) from None
    await _write_pending(parts, upload, at_least=1)
    if not parts.complete:
        raise _broken("it ends before its closing boundary")
    if "request" not in parts.seen:
        raise UnprocessableError(
            "The part 'request' is missing; send it as a JSON object beside 'audio'.",
            code="missing_field",
            field="request",
        )


async def _write_pending(parts: _Parts, upload: BinaryIO, *, at_least: int) -> None:
    # A write that is cut off by a cancellation holds the file's lock until it is done, so closing
    # the file waits for it.
    if len(parts.pending) >= at_least:
        data, parts.pending = parts.pending, bytearray()
        await asyncio.to_thread(upload.write, data)


def _broken(why: str) -> UnprocessableError:
    return UnprocessableError(
        f"The body is no {MULTIPART_TYPE} that can be read: {why}; let your HTTP client build it.",
        code="invalid_multipart",
    )


# JSON


async def _parse_off_loop(body: bytearray) -> object:
    if len(body) <= THREAD_BYTES:
        return parse_json(body)
    return await asyncio.to_thread(parse_json, body)


def parse_json(body: bytes | bytearray) -> object:
    """The value of a JSON text in UTF-8, more strictly read than `json.loads` does.

    Raises UnprocessableError with the path of a duplicate key, of NaN or Infinity, of a number
    beyond float64, of a lone surrogate, of an integer of more than 64 digits or of nesting deeper
    than 64; with line and column where the text is no JSON.
    """
    if body.startswith(b"\xef\xbb\xbf"):
        raise _not_json("it starts with a byte order mark")
    skeleton, lifted = _lift_songs(body)
    if _has_too_many_values(skeleton):
        raise UnprocessableError(
            f"The body has more than {MAX_VALUES} values; send fewer.", code="too_complex"
        )
    return _Checker(lifted).checked(_loads(skeleton), ())


def _has_too_many_values(text: bytes | bytearray) -> bool:
    """Counted before parsing: a text of 60 MB can hold 20 million values of 60 bytes each."""
    if _count_marks(text) <= MAX_VALUES:
        return False
    # Without escapes every quote starts or ends a string, so each second piece is outside of them.
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 4 * MAX_VALUES:
        return True
    return _count_marks(b"".join(unescaped.split(b'"')[::2])) > MAX_VALUES


def _count_marks(text: bytes | bytearray) -> int:
    """Commas and opening brackets: as many as values, or more."""
    return sum(text.count(mark) for mark in (b",", b"[", b"{"))


def _lift_songs(body: bytes | bytearray) -> tuple[bytes | bytearray, dict[str, str]]:
    """Cut long base64 songs out of the body: a placeholder for each, and what it stands for.

    json's scanner holds the interpreter for about 7 ns a byte, so a song of 60 MB would hold up
    every other request for half a second. A `"audio"` whose second quote has no backslash before
    it is a key, or the text is no JSON with or without the song.
    """
    songs: dict[str, str] = {}
    pieces: list[bytes | bytearray] = []
    done = 0
    worthwhile = len(body) > LIFT_BYTES and body.count(_AUDIO_KEY) <= MAX_LIFTED
    position = body.find(_AUDIO_KEY) if worthwhile else -1
    while position != -1:
        position += len(_AUDIO_KEY)
        value = _VALUE_START.match(body, position)
        end = body.find(b'"', value.end()) if value else -1
        if value and end - value.end() > LIFT_BYTES and _plain(body, value.end(), end):
            placeholder = secrets.token_hex(16)
            songs[placeholder] = str(memoryview(body)[value.end() : end], "ascii")
            pieces += body[done : value.end()], placeholder.encode()
            done = position = end
        position = body.find(_AUDIO_KEY, position)
    if not songs:
        return body, songs
    return b"".join([*pieces, body[done:]]), songs


def _plain(body: bytes | bytearray, start: int, end: int) -> bool:
    """Whether the bytes are printable ASCII without quotes and backslashes, looked at in slices."""
    slices = range(start, end, LIFT_BYTES)
    return not any(_NOT_PLAIN.search(body, at, min(at + LIFT_BYTES, end)) for at in slices)


@dataclass(frozen=True)
class _Flaw:
    """Stands in the parsed value where json cannot say the path of what is wrong."""

    message: str
    key: str | None = None
    code: str = "invalid_value"


def _loads(text: bytes | bytearray) -> object:
    try:
        return json.loads(
            str(text, "utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_integer,
        )
    except UnicodeDecodeError as error:
        raise _not_json(f"byte {error.start} is no UTF-8") from None
    except json.JSONDecodeError as error:
        raise _not_json(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise _too_deep(None) from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object] | _Flaw:
    obj = dict(pairs)
    if len(obj) == len(pairs):
        return obj
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return _Flaw("is there twice; send it once", key, "duplicate_field")
        seen.add(key)
    raise AssertionError("fewer keys than pairs, and none twice")


def _constant(name: str) -> _Flaw:
    return _Flaw(f"is {name}, which is no JSON; send a finite number")


def _float(digits: str) -> float | _Flaw:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        return _Flaw(f"is {digits[:80]}, which is too large; send a finite number")
    return number


def _integer(digits: str) -> int | _Flaw:
    if len(digits) > MAX_INTEGER_DIGITS:
        return _Flaw(f"is an integer of {len(digits)} digits; send at most {MAX_INTEGER_DIGITS}")
    return int(digits)


def _not_json(why: str) -> UnprocessableError:
    return UnprocessableError(
        f"The body is no JSON: {why}. Send one JSON object in UTF-8.", code="invalid_json"
    )


def _too_deep(path: str | None) -> UnprocessableError:
    return UnprocessableError(
        f"The body nests deeper than {MAX_DEPTH} levels; send a flatter one.",
        code="too_deep",
        field=path,
    )


@dataclass(frozen=True)
class _Checker:
    """Walks a parsed value in the order of the text: puts songs back, stops at the first flaw."""

    songs: dict[str, str]

    def checked(self, value: object, path: tuple[str | int, ...]) -> object:
        if isinstance(value, str):
            return self._text(value, path)
        if isinstance(value, _Flaw):
            _refuse(value, path)
        if isinstance(value, dict):
            self._enter(value, value.items(), path)
        elif isinstance(value, list):
            self._enter(value, enumerate(value), path)
        return value

    def _enter(
        self, container: Any, items: Iterable[tuple[str | int, object]], path: tuple[str | int, ...]
    ) -> None:
        if len(path) >= MAX_DEPTH:
            raise _too_deep(field_path(path))
        for key, value in items:
            inner = (*path, key)
            if isinstance(key, str):
                _refuse_surrogates(key, inner)
            container[key] = self.checked(value, inner)

    def _text(self, text: str, path: tuple[str | int, ...]) -> str:
        _refuse_surrogates(text, path)
        return self.songs.get(text, text)


def _refuse_surrogates(text: str, path: tuple[str | int, ...]) -> None:
    if text.isascii() or not re.search("[\ud800-\udfff]", text):
        return
    _refuse(_Flaw("has a lone surrogate, half a character; send whole characters"), path)


def _refuse(flaw: _Flaw, path: tuple[str | int, ...]) -> NoReturn:
    where = field_path(path if flaw.key is None else (*path, flaw.key)) or None
    raise UnprocessableError(f"{where or 'The body'} {flaw.message}.", code=flaw.code, field=where)


# OpenAPI


_ANY_SONG = [
    {"required": [name], "properties": {name: {"type": "string"}}}
    for name in ("audio_url", "audio")
]


def openapi_request_body(model: type[BaseModel], *, with_song: bool = False) -> dict[str, Any]:
    """What a route's `openapi_extra` says of a body that `read_body` reads; `with_song` where it
    cannot be without one."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    extra: Any = model.model_config.get("json_schema_extra") or {}
    examples = {
        ("song" if "audio" in value else "text"): {"value": value}
        for value in extra.get("examples", ())
    }
    upload = {"type": "string", "format": "binary", "contentMediaType": "application/octet-stream"}
    form = {
        "type": "object",
        "properties": {"request": reference, "audio": upload},
        "required": ["request"],
        "additionalProperties": False,
        "description": "`audio` is the song; `request` names none beside it.",
    }
    body: dict[str, Any] = reference
    if with_song:
        body = {**reference, "anyOf": _ANY_SONG}
        form["anyOf"] = [{"required": ["audio"]}, {"properties": {"request": {"anyOf": _ANY_SONG}}}]
    content = {
        JSON_TYPE: {"schema": body, "examples": examples},
        MULTIPART_TYPE: {
            "schema": form,
            "encoding": {"request": {"contentType": JSON_TYPE}},
        },
    }
    return {"requestBody": {"required": True, "content": content}}


def add_request_schemas(document: dict[str, Any], models: Iterable[type[BaseModel]]) -> None:
    """Add the schemas that `openapi_request_body` refers to, to a generated OpenAPI document."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
    )
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas.get("$defs", {}))
