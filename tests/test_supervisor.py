"""The engine's life: started, watched, started anew after its death, and given up in the end."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from adapter import supervisor as supervision
from adapter.checkpoint import Checkpoint, load_checkpoint
from adapter.engine import Engine
from adapter.errors import EngineDeadError, UnavailableError
from adapter.keys import Client
from adapter.metrics import EngineReading, Metrics
from adapter.schemas import GenerateBatchRequest
from adapter.service import Started
from adapter.settings import Settings, load_settings
from adapter.supervisor import Supervisor
from tests.fakes import FakeEngine, failing


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(supervision, "MAX_BACKOFF_SECONDS", 0.01)


class Mortal(FakeEngine):
    """An engine that can be killed from outside, or be stuck until it is."""

    killed = False
    stuck = False
    killable = True
    progress_at = 0.0

    async def generate(self, prepared):  # type: ignore[no-untyped-def]
        while self.stuck and not self.killed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async for output in super().generate(prepared):
            if self.killed:
                raise EngineDeadError("killed")
            yield output

    async def check_health(self) -> None:
        if self.killed:
            raise EngineDeadError("killed")

    def last_progress_at(self) -> float:
        return self.progress_at

    def kill(self) -> bool:
        self.killed = self.killable
        return self.killable


Restart = Callable[[Settings, Checkpoint], tuple[Engine, str]]


@asynccontextmanager
async def supervised(
    model: Path, engine: FakeEngine, restart: Restart, **settings: str
) -> AsyncIterator[Supervisor]:
    """A supervisor whose first engine is `engine`, and is ready."""
    checkpoint = load_checkpoint(str(model))
    variables = {f"ADAPTER_{name.upper()}": value for name, value in settings.items()}
    supervisor = Supervisor(
        load_settings({"ADAPTER_MODEL": str(model), "ADAPTER_USAGE_DB": "", **variables}),
        lambda _: Started(checkpoint, engine, "a test"),
        restart,
        metrics=Metrics(EngineReading),
    )
    supervisor.start()
    await until(lambda: supervisor.status() == "ok")
    yield supervisor
    await supervisor.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def replaced_by(*engines: FakeEngine) -> Restart:
    """A restart that brings these engines one after the other, and fails after the last."""
    left = list(engines)

    def restart(_: Settings, __: Checkpoint) -> tuple[Engine, str]:
        if not left:
            raise RuntimeError("no engine left")
        return left.pop(0), "again"

    return restart


BATCH = GenerateBatchRequest.model_validate({"prompts": [{"max_new_tokens": 3}] * 4})


async def test_a_batch_whose_engine_dies_in_the_middle_arrives_whole(random_model: Path) -> None:
    first = Mortal(continuous=True, fail=failing(4, EngineDeadError))
    second = Mortal(continuous=True)
    async with supervised(random_model, first, replaced_by(second)) as supervisor:
        answer = await supervisor.service.generate_batch(BATCH, None, Client())
    assert [one.finish_reason for one in answer.answers] == ["length"] * 4
    assert len(second.calls) == 4
    assert supervisor.num_restarts == 1


async def test_while_it_restarts_newcomers_get_503_restarting(random_model: Path) -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def restart(_: Settings, __: Checkpoint) -> tuple[Engine, str]:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        return Mortal(continuous=True), "again"

    engine = Mortal(continuous=True)
    async with supervised(random_model, engine, restart) as supervisor:
        engine.killed = True
        await until(lambda: supervisor.status() == "restarting")
        with pytest.raises(UnavailableError) as refusal:
            _ = supervisor.service
        release.set()
        await until(lambda: supervisor.status() == "ok")
    assert refusal.value.code == "restarting"


async def test_an_engine_that_dies_between_requests_is_noticed_and_replaced(
    random_model: Path,
) -> None:
    engine, second = Mortal(continuous=True), Mortal(continuous=True)
    async with supervised(random_model, engine, replaced_by(second)) as supervisor:
        engine.killed = True
        await until(lambda: supervisor.num_restarts == 1)
        await until(lambda: supervisor.status() == "ok")
        await supervisor.service.generate_batch(BATCH, None, Client())
    assert len(second.calls) == 4


async def test_after_too_many_restarts_in_a_row_it_gives_up_and_says_so(random_model: Path) -> None:
    engine = Mortal(continuous=True)
    told = asyncio.Event()
    async with supervised(random_model, engine, replaced_by(), max_restarts="2") as supervisor:
        supervisor.on_failure = told.set
        engine.killed = True
        await asyncio.wait_for(told.wait(), 20)
        assert supervisor.status() == "failed"
        assert supervisor.num_restarts == 2
        with pytest.raises(UnavailableError, match="2 restarts in a row"):
            _ = supervisor.service


async def test_who_waits_for_an_engine_that_is_given_up_is_told(random_model: Path) -> None:
    engine = Mortal(continuous=True, fail=failing(99, EngineDeadError))
    async with supervised(random_model, engine, replaced_by(), max_restarts="1") as supervisor:
        answer = await supervisor.service.generate_batch(BATCH, None, Client())
    codes = {one.error.code for one in answer.answers if one.error}
    assert codes == {"failed"}


async def test_an_answer_between_two_deaths_starts_the_count_anew(random_model: Path) -> None:
    engines = [Mortal(continuous=True) for _ in range(5)]
    async with supervised(
        random_model, engines[0], replaced_by(*engines[1:]), max_restarts="1"
    ) as supervisor:
        for number, engine in enumerate(engines[:-1], 1):
            await supervisor.service.generate_batch(BATCH, None, Client())
            engine.killed = True
            await until(lambda number=number: supervisor.num_restarts == number)  # type: ignore[misc]
            await until(lambda: supervisor.status() == "ok")


async def test_a_stuck_engine_is_ended_and_its_prompts_are_answered_by_the_next(
    random_model: Path,
) -> None:
    stuck, second = Mortal(continuous=True), Mortal(continuous=True)
    stuck.stuck = True
    async with supervised(
        random_model, stuck, replaced_by(second), stall_seconds="1"
    ) as supervisor:
        answer = await supervisor.service.generate_batch(BATCH, None, Client())
    assert stuck.killed
    assert [one.finish_reason for one in answer.answers] == ["length"] * 4


async def test_a_busy_engine_that_ends_steps_is_left_alone(random_model: Path) -> None:
    busy = Mortal(continuous=True, step_seconds=0.5)
    async with supervised(random_model, busy, replaced_by(), stall_seconds="1") as supervisor:
        working = asyncio.create_task(supervisor.service.generate_batch(BATCH, None, Client()))
        while not working.done():
            busy.progress_at = time.monotonic()
            await asyncio.sleep(0.05)
    assert working.result().answers[0].finish_reason == "length"
    assert not busy.killed


async def test_a_stuck_engine_that_cannot_be_ended_alone_ends_the_server(
    random_model: Path,
) -> None:
    stuck = Mortal(continuous=False)
    stuck.stuck, stuck.killable = True, False
    told = asyncio.Event()
    async with supervised(random_model, stuck, replaced_by(), stall_seconds="1") as supervisor:
        supervisor.on_failure = told.set
        working = asyncio.create_task(supervisor.service.generate_batch(BATCH, None, Client()))
        await asyncio.wait_for(told.wait(), 20)
        assert supervisor.status() == "failed"
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
