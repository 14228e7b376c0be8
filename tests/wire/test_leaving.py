"""A client that leaves stops its work in the engine."""

import time

import httpx
import pytest

from tests.server import LONG_LIST, Server
from tests.wire.audio import as_base64, song


def test_the_engine_is_free_within_a_second_after_a_client_left(server: Server) -> None:
    prompt = {"max_new_tokens": 512, "json_schema": LONG_LIST}
    body = {"audio": as_base64(song(30)), "prompts": [prompt] * 64}
    with pytest.raises(httpx.ReadTimeout):
        server.post("/generate_batch", body, timeout_seconds=1)
    time.sleep(1)
    started = time.monotonic()
    answer = server.post("/generate", {"max_new_tokens": 4}).json()
    assert time.monotonic() - started < 2
    assert answer["timings"]["queue_seconds"] < 0.5
    # With the others still in the engine it would pay a small part of its time.
    in_engine_seconds = answer["timings"]["wall_seconds"] - answer["timings"]["queue_seconds"]
    assert answer["elapsed_seconds"] > 0.5 * in_engine_seconds
