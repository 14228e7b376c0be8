"""What one key may have in flight and use in a day."""

import asyncio
from pathlib import Path

import pytest

from adapter.errors import TooManyRequestsError
from adapter.quotas import DAY_SECONDS, Quotas
from tests.fakes import FakeEngine
from tests.test_api import client

AUTHORIZATION = {"Authorization": "Bearer key-1"}


class Clock:
    """A wall clock that stands until it is set."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


def quotas(
    *,
    max_prompts: int | None = None,
    max_seconds: float | None = None,
    used: dict[str, float] | None = None,
    clock: Clock | None = None,
) -> Quotas:
    return Quotas(
        max_prompts=max_prompts,
        max_seconds_per_day=max_seconds,
        used_today=used or {},
        clock=clock or Clock(100 * DAY_SECONDS + 3600),
    )


def refusal(quotas: Quotas, name: str, num_prompts: int = 1) -> TooManyRequestsError:
    with pytest.raises(TooManyRequestsError) as caught, quotas.admit(name, num_prompts):
        pass
    return caught.value


def test_a_key_has_so_many_prompts_in_flight_and_no_more() -> None:
    limited = quotas(max_prompts=3)
    with limited.admit("ann", 2):
        assert refusal(limited, "ann", 2).code == "too_many_prompts"
        with limited.admit("ann", 1), limited.admit("bob", 3):
            pass
    with limited.admit("ann", 3):
        pass


def test_a_refused_request_leaves_the_count_as_it_was() -> None:
    limited = quotas(max_prompts=1)
    for _ in range(5):
        refusal(limited, "ann", 2)
    with limited.admit("ann", 1):
        pass


def test_the_seconds_of_a_day_end_and_start_anew_at_midnight() -> None:
    clock = Clock(100 * DAY_SECONDS + 3600)
    limited = quotas(max_seconds=10, clock=clock)
    limited.spend("ann", 10.0)
    error = refusal(limited, "ann")
    assert error.code == "daily_limit_reached"
    assert error.retry_after_seconds == DAY_SECONDS - 3600
    with limited.admit("bob", 1):
        pass
    clock.seconds += error.retry_after_seconds
    with limited.admit("ann", 1):
        pass


def test_what_was_used_before_a_restart_counts() -> None:
    assert refusal(quotas(max_seconds=10, used={"ann": 12.5}), "ann").code == "daily_limit_reached"


def test_whoever_has_no_name_has_no_limit() -> None:
    limited = quotas(max_prompts=0, max_seconds=0)
    with limited.admit(None, 1000):
        limited.spend(None, 1000)


def test_a_key_has_no_more_bodies_on_their_way_than_it_may_have_prompts() -> None:
    limited = quotas(max_prompts=1)
    with (
        limited.receive("ann"),
        limited.receive("bob"),
        limited.receive(None),
        pytest.raises(TooManyRequestsError),
        limited.receive("ann"),
    ):
        pass
    with limited.receive("ann"):
        pass


async def test_a_refusal_that_passes_is_not_kept_for_an_idempotency_key(random_model: Path) -> None:
    settings = {"api_keys": "ann:key-1", "key_max_prompts": "1"}
    headers = AUTHORIZATION | {"Idempotency-Key": "one"}
    engine = FakeEngine(continuous=True, step_seconds=0.05)
    async with client(random_model, engine, **settings) as http:
        auth = {"Authorization": "Bearer key-1"}
        other = asyncio.create_task(
            http.post("/generate", json={"max_new_tokens": 9}, headers=auth)
        )
        await asyncio.sleep(0.2)
        refused = await http.post("/generate", json={"max_new_tokens": 1}, headers=headers)
        assert (await other).status_code == 200
        again = await http.post("/generate", json={"max_new_tokens": 1}, headers=headers)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
    assert again.status_code == 200


async def test_a_key_past_its_limit_gets_429_and_others_are_answered(random_model: Path) -> None:
    settings = {"api_keys": "ann:key-1,bob:key-2", "key_max_prompts": "2"}
    body = {"prompts": [{"max_new_tokens": 1}] * 3}
    async with client(random_model, FakeEngine(continuous=True), **settings) as http:
        refused = await http.post(
            "/generate_batch", json=body, headers={"Authorization": "Bearer key-1"}
        )
        answered = await http.post("/generate", json={}, headers={"Authorization": "Bearer key-2"})
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "too_many_prompts"
    assert int(refused.headers["retry-after"]) > 0
    assert answered.status_code == 200


async def test_the_day_of_a_key_is_counted_over_restarts_by_the_usage_log(
    random_model: Path, tmp_path: Path
) -> None:
    settings = {
        "api_keys": "ann:key-1",
        "key_max_seconds_per_day": "0.05",
        "usage_db": str(tmp_path / "usage.sqlite3"),
    }
    headers = {"Authorization": "Bearer key-1"}
    statuses = []
    for _ in range(2):
        engine = FakeEngine(continuous=True, step_seconds=0.02)
        async with client(random_model, engine, **settings) as http:
            sent = await http.post("/generate", json={"max_new_tokens": 5}, headers=headers)
            statuses.append(sent.status_code)
    assert statuses == [200, 429]
