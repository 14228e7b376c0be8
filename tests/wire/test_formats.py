"""One song in twelve formats: each is answered, and the lossless ones with one answer."""

from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server import Server
from tests.songs import FORMATS, Samples, encode, melody

SECONDS = 12
LOSSLESS = ["wav-16", "wav-24", "wav-float", "flac", "alac", "aiff"]
LOSSY = ["mp3", "ogg-vorbis", "opus", "m4a", "wma", "mp4-video"]


def in_sixteen_bits(samples: Samples) -> Samples:
    """The samples as every lossless format can hold them."""
    return np.rint(samples * 2**15) / 2**15


@pytest.fixture(scope="module")
def answers(server: Server) -> Mapping[str, Any]:
    """The body that each format was answered with; name and content type always say text."""
    return {name: ask(server, name) for name in [*LOSSLESS, *LOSSY]}


def ask(server: Server, name: str) -> Any:
    song = in_sixteen_bits(melody(SECONDS, FORMATS[name].rate))
    request = b'{"prompt": "Which instruments do you hear?", "max_new_tokens": 32}'
    files = {
        "request": (None, request, "application/json"),
        "audio": ("words.txt", encode(song, name), "text/plain"),
    }
    response = httpx.post(server.url + "/generate", files=files, timeout=300)
    assert response.status_code == 200, f"{name}: {response.text}"
    return response.json()


@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_a_song_is_answered_in_each_format_with_its_duration(
    answers: Mapping[str, Any], name: str
) -> None:
    answer = answers[name]
    tolerance_seconds = 1e-3 if name in LOSSLESS else 0.1
    assert answer["response"]
    assert answer["audio"]["duration_seconds"] == pytest.approx(SECONDS, abs=tolerance_seconds)
    assert answer["audio"]["heard_seconds"] == pytest.approx(SECONDS, abs=0.15)


def test_the_lossless_formats_have_one_answer(answers: Mapping[str, Any]) -> None:
    assert len({answers[name]["response"] for name in LOSSLESS}) == 1
    assert len({answers[name]["usage"]["completion_tokens"] for name in LOSSLESS}) == 1
