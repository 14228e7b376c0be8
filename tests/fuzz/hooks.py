"""What schemathesis has to be told of the API beyond its document; see schemathesis.toml.

A document cannot say that a string is a song in base64, that a moment lies inside the song, that an
idempotency key is new, or that none comes beside a stream. Cases that should be answered are made
so here; those that should be refused go out as they were generated.
"""

import base64
import os
import uuid
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis.core.failures import AcceptedNegativeData, Failure
from schemathesis.transport.serialization import Binary

from tests.fuzz.openapi import TALLY_VARIABLE
from tests.fuzz.songs import SONG_SECONDS, small_songs

SONGS = list(small_songs().values())
SOURCES = {"audio_url", "audio"}
MAX_PROMPT_CHARACTERS = 300
BASE64_SONG = base64.b64encode(small_songs()["flac"]).decode()

schemathesis.openapi.format("binary", st.sampled_from(SONGS) | st.binary(max_size=200))


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext,  # noqa: ARG001
    case: schemathesis.Case,
    kwargs: dict[str, Any],  # noqa: ARG001
) -> None:
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if case.headers and "Idempotency-Key" in case.headers:
        case.headers["Idempotency-Key"] = uuid.uuid4().hex
        if _is_streamed(case.body):  # which excludes a key
            del case.headers["Idempotency-Key"]
    if isinstance(case.body, dict):
        case.body = with_real_songs(case.body)
    # Else schemathesis would judge the case anew, and a form with a file in it is invalid to it.
    case._record_starting_state()


@schemathesis.hook
def after_call(
    context: schemathesis.HookContext,  # noqa: ARG001
    case: schemathesis.Case,
    response: schemathesis.Response,
) -> None:
    with Path(os.environ[TALLY_VARIABLE]).open("a") as tally:
        tally.write(f"{case.operation.path}\t{response.status_code}\n")


@schemathesis.hook
def filter_failure(
    context: schemathesis.HookContext,  # noqa: ARG001
    failure: Failure,
    case: schemathesis.Case,
    response: schemathesis.Response,  # noqa: ARG001
) -> bool:
    """schemathesis validates no form with a file in it, and so takes some for invalid that are not:
    a mutation from string to null of a field that may be either."""
    return not (isinstance(failure, AcceptedNegativeData) and _is_valid_form(case))


def _is_streamed(body: object) -> bool:
    request = body.get("request", body) if isinstance(body, dict) else None
    return isinstance(request, dict) and request.get("stream") is True


def _is_valid_form(case: schemathesis.Case) -> bool:
    if case.media_type != "multipart/form-data" or not isinstance(case.body, dict):
        return False
    if not {"request"} <= case.body.keys() <= {"request", "audio"}:
        return False
    document = case.operation.schema.raw_schema
    content = document["paths"][case.path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"] | {"components": document["components"]}
    return Draft202012Validator(schema).is_valid(case.body["request"])


def with_real_songs(body: dict[str, Any]) -> dict[str, Any]:
    """A valid body, JSON or form, with a decodable song wherever it has one, and moments in it."""
    if "request" in body:
        if "audio" not in body:
            return {"request": _answerable(body["request"], uploaded=False)}
        request = {name: body["request"][name] for name in body["request"].keys() - SOURCES}
        song = Binary(SONGS[len(str(body)) % len(SONGS)])
        return {"request": _answerable(request, uploaded=True), "audio": song}
    return _answerable(body, uploaded=False)


def _answerable(request: dict[str, Any], *, uploaded: bool) -> dict[str, Any]:
    shared = uploaded or _has_song(request)
    request = _with_song(request)
    if "prompts" not in request:
        return _cheap(request, shared)
    prompts = [_cheap(_with_song(p), shared or _has_song(p)) for p in request["prompts"]]
    return request | {"prompts": prompts}


def _has_song(request: dict[str, Any]) -> bool:
    return request.get("audio") is not None or request.get("audio_url") is not None


def _with_song(request: dict[str, Any]) -> dict[str, Any]:
    if not _has_song(request):
        return request
    return {name: request[name] for name in request.keys() - SOURCES} | {"audio": BASE64_SONG}


def _cheap(prompt: dict[str, Any], heard: bool) -> dict[str, Any]:
    """With a prompt that fits the context, and a moment that lies in the song, if there is one."""
    start, end = prompt.get("start_seconds"), prompt.get("end_seconds")
    if "prompt" in prompt:
        prompt = prompt | {"prompt": prompt["prompt"][:MAX_PROMPT_CHARACTERS]}
    if prompt.get("json_schema") is not None:  # the document cannot say which objects are schemas
        prompt = prompt | {"json_schema": {"enum": [True, "no", 7]}}
    if prompt.get("preset") is not None:  # which excludes a prompt
        prompt = {name: prompt[name] for name in prompt.keys() - {"prompt"}}
        prompt |= {"max_new_tokens": 4}
    if start is not None:
        prompt = prompt | {"start_seconds": start % (SONG_SECONDS / 4) if heard else None}
    if end is not None:
        prompt = prompt | {"end_seconds": SONG_SECONDS / 2 + end if heard else None}
    return prompt
