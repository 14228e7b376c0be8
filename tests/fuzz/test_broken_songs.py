"""Whatever becomes of the bytes of a song: it is answered, or refused as no song."""

import base64
import random

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.songs import EDITS, FORMATS, SONG_SECONDS, Edit, mutated, small_songs
from tests.fuzz.traffic import Request, fault, json_request, upload_request
from tests.server import Server

FUZZING = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SONGS = st.randoms(use_true_random=False).map(mutated)


def ask(server: Server, request: Request) -> httpx.Response:
    return httpx.request(
        request.method,
        server.url + request.path,
        headers=list(request.headers),
        content=request.content,
        timeout=60,
    )


def answered_or_refused(server: Server, request: Request) -> None:
    response = ask(server, request)
    assert response.status_code in (200, 413, 415, 422), response.text
    assert fault(request, response) is None


@pytest.mark.parametrize("name", FORMATS)
def test_an_unbroken_song_is_answered(fuzzed: Server, name: str) -> None:
    response = ask(fuzzed, upload_request("/generate", {}, small_songs()[name]))
    assert response.status_code == 200, response.text
    duration_seconds = response.json()["audio"]["duration_seconds"]
    assert duration_seconds == pytest.approx(SONG_SECONDS, abs=0.08)  # codecs pad


@FUZZING
@given(song=SONGS)
def test_a_broken_upload_is_answered_or_refused(fuzzed: Server, song: bytes) -> None:
    answered_or_refused(fuzzed, upload_request("/generate", {}, song))


@FUZZING
@given(song=SONGS)
def test_a_broken_song_in_base64_is_answered_or_refused(fuzzed: Server, song: bytes) -> None:
    body = {"audio": base64.b64encode(song).decode(), "prompts": [{}]}
    answered_or_refused(fuzzed, json_request("/generate_batch", body))


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_every_edit_changes_most_songs(edit: Edit) -> None:
    rng = random.Random(0)
    songs = list(small_songs().values())
    changed = sum(edit(rng, song) != song for song in songs)
    assert changed > len(songs) / 2
