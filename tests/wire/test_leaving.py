"""A client that leaves stops its work in the engine."""

import time

import httpx
import pytest

from tests.server import Server
from tests.wire.audio import as_base64, song


def test_the_engine_is_free_within_a_second_after_a_client_left(server: Server) -> None:
    prompts = [{"prompt": f"Part {i}?", "max_new_tokens": 512} for i in range(64)]
    body = {"audio": as_base64(song(30)), "prompts": prompts}
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
