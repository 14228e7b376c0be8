"""More prompts than fit: each is answered or refused, and none waits for a whole big batch."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.test_api import client

both = pytest.mark.parametrize("continuous", [True, False], ids=["continuous", "static"])


@both
async def test_three_hundred_prompts_against_a_queue_of_64_are_answered_or_refused(
    random_model: Path, continuous: bool
) -> None:
    engine = FakeEngine(continuous=continuous, step_seconds=0.002)
    body = {"prompts": [{"max_new_tokens": 4}] * 10}
    async with client(random_model, engine, max_num_seqs="8", max_queued="64") as http:
        responses = await asyncio.gather(
            *(http.post("/generate_batch", json=body) for _ in range(30))
        )
    answered = [response.json() for response in responses if response.status_code == 200]
    refused = [response for response in responses if response.status_code == 503]
    assert len(answered) + len(refused) == 30 and answered and refused
    for batch in answered:
        assert [answer["finish_reason"] for answer in batch["answers"]] == ["length"] * 10
    for response in refused:
        assert response.json()["error"]["code"] == "queue_full"
        assert int(response.headers["retry-after"]) > 0
    assert engine.most_inside <= 8
    assert len(set(flat(engine.calls))) == 10 * len(answered)


@both
async def test_a_single_prompt_waits_less_than_a_quarter_of_a_big_batchs_time(
    random_model: Path, continuous: bool
) -> None:
    engine = FakeEngine(continuous=continuous, step_seconds=0.01)
    big = {"prompts": [{"max_new_tokens": 10}] * 64, "group_size": 4}
    async with client(random_model, engine, max_num_seqs="4") as http:
        batch = asyncio.create_task(http.post("/generate_batch", json=big))
        await until_busy(engine)
        single = (await http.post("/generate", json={"max_new_tokens": 10})).json()
        wall_seconds = (await batch).json()["timings"]["wall_seconds"]
    assert single["timings"]["queue_seconds"] < wall_seconds / 4


async def test_a_full_queue_refuses_before_the_song_is_touched(random_model: Path) -> None:
    engine = FakeEngine(continuous=True, step_seconds=0.05)
    async with client(random_model, engine, max_num_seqs="1", max_queued="1") as http:
        waiting = asyncio.create_task(
            http.post("/generate_batch", json={"prompts": [{"max_new_tokens": 20}] * 2})
        )
        await until_busy(engine)
        no_song: dict[str, Any] = {"audio": "!!! no base64 !!!"}
        response = await http.post("/generate", json=no_song)
        await waiting
    assert response.status_code == 503


async def test_waiting_is_reported_and_not_billed(random_model: Path) -> None:
    engine = FakeEngine(continuous=False, step_seconds=0.02)
    body = {"max_new_tokens": 10}
    async with client(random_model, engine) as http:
        first, second = await asyncio.gather(*(ask(http, body) for _ in range(2)))
    assert second["timings"]["queue_seconds"] > 0.15
    assert second["elapsed_seconds"] == pytest.approx(first["elapsed_seconds"], rel=0.5)


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    return (await http.post("/generate", json=body)).json()


async def until_busy(engine: FakeEngine) -> None:
    async with asyncio.timeout(20):
        while not engine.inside:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def flat(calls: list[list[str]]) -> list[str]:
    return [name for call in calls for name in call]
