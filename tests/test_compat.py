"""The batch API on an engine: windows, groups, retries, deadlines, and each prompt's share."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

import numpy as np
import pytest

from adapter.admission import Party
from adapter.billing import Meter
from adapter.compat import Scheduler, Ticket, sampling_groups
from adapter.errors import (
    DeadlineExceededError,
    EngineCrashedError,
    EngineDeadError,
    EngineError,
    EngineOutOfMemoryError,
    UnprocessableError,
)
from adapter.request import Clip, EngineOutput, EngineRequest, Sampling
from tests.fakes import FakeEngine, Fixed, failing

CLIP = Clip(np.zeros(16_000, np.float32), "a-song", 1.0, 0.0, False)


def ticket(name: str, sampling: Sampling | None = None, *, clip: Clip | None = None) -> Ticket:
    request = EngineRequest(name, (1, 2, 3), clip, 0, sampling or Sampling(max_new_tokens=3))

    async def make() -> EngineRequest:
        return request

    return Ticket(make, request=request)


def tickets(count: int, sampling: Sampling | None = None) -> list[Ticket]:
    return [ticket(f"p{i}", sampling) for i in range(count)]


async def run(
    engine: FakeEngine,
    batch: Sequence[Ticket],
    *,
    group_size: int | None = None,
    timeout_seconds: float = 10.0,
    max_num_seqs: int = 64,
) -> Meter:
    meter = Meter()
    scheduler = scheduler_on(engine, meter, max_num_seqs=max_num_seqs)
    await scheduler.run(
        batch, group_size=group_size, timeout_seconds=timeout_seconds, party=Party()
    )
    return meter


def scheduler_on(
    engine: FakeEngine, meter: Meter, *, max_num_seqs: int = 64, max_group_size: int = 64
) -> Scheduler:
    return Scheduler(
        Fixed(engine),
        meter,
        continuous=engine.continuous,
        max_num_seqs=max_num_seqs,
        max_group_size=max_group_size,
    )


def paid(batch: Sequence[Ticket]) -> float:
    return sum(ticket.elapsed_seconds for ticket in batch)


# A continuous engine: a call for each prompt, group_size a sliding window.


async def test_a_continuous_engine_gets_every_prompt_at_once_where_there_is_no_window() -> None:
    engine = FakeEngine(continuous=True)
    await run(engine, tickets(13))
    assert engine.most_inside == 13
    assert engine.calls == [[f"p{i}"] for i in range(13)]


@pytest.mark.parametrize("group_size", [1, 2, 5])
async def test_the_window_is_never_exceeded_and_always_filled(group_size: int) -> None:
    engine = FakeEngine(continuous=True)
    await run(engine, tickets(13), group_size=group_size)
    assert engine.most_inside == group_size


async def test_the_window_slides_as_soon_as_one_prompt_ends() -> None:
    engine = FakeEngine(continuous=True, step_seconds=0.002)
    long, short, waiting = (
        ticket(name, Sampling(n)) for name, n in zip("abc", (50, 1, 1), strict=True)
    )
    await run(engine, [long, short, waiting], group_size=2)
    assert waiting.elapsed_seconds > 0
    assert engine.calls == [["a"], ["b"], ["c"]]
    assert long.elapsed_seconds > 10 * waiting.elapsed_seconds  # c did not wait for a's end


async def test_no_more_than_max_num_seqs_are_in_the_engine() -> None:
    engine = FakeEngine(continuous=True)
    await run(engine, tickets(13), max_num_seqs=4)
    assert engine.most_inside == 4


async def test_waiting_for_a_seat_is_queue_time_and_costs_nothing() -> None:
    engine = FakeEngine(continuous=True, step_seconds=0.02)
    first, second = tickets(2, Sampling(max_new_tokens=3))
    started = time.monotonic()
    await run(engine, [first, second], max_num_seqs=1)
    wall_seconds = time.monotonic() - started
    assert second.queue_seconds >= 0.05 > first.queue_seconds
    assert second.elapsed_seconds == pytest.approx(wall_seconds / 2, rel=0.3)


async def test_a_prompt_that_fails_inside_a_continuous_engine_is_tried_once_more_alone() -> None:
    engine = FakeEngine(continuous=True, fail=failing(1, EngineError, naming="p1"))
    batch = tickets(3)
    await run(engine, batch)
    assert [ticket.finish_reason for ticket in batch] == ["length"] * 3
    assert engine.calls == [["p0"], ["p1"], ["p2"], ["p1"]]


async def test_a_prompt_that_fails_twice_is_failed_and_the_others_stand() -> None:
    engine = FakeEngine(continuous=True, fail=failing(9, EngineError, naming="p1"))
    batch = tickets(3)
    await run(engine, batch)
    assert [ticket.error is None for ticket in batch] == [True, False, True]
    assert engine.calls.count(["p1"]) == 2


# A static engine: groups that share their sampling.


async def test_a_static_engine_gets_groups_of_eight_where_the_request_names_no_size() -> None:
    engine = FakeEngine(continuous=False)
    await run(engine, tickets(13))
    assert [len(call) for call in engine.calls] == [8, 5]


async def test_a_smaller_max_group_size_is_the_default() -> None:
    engine = FakeEngine(continuous=False)
    scheduler = scheduler_on(engine, Meter(), max_group_size=4)
    await scheduler.run(tickets(9), group_size=None, timeout_seconds=9, party=Party())
    assert [len(call) for call in engine.calls] == [4, 4, 1]


async def test_group_size_one_decodes_one_at_a_time() -> None:
    engine = FakeEngine(continuous=False)
    await run(engine, tickets(3), group_size=1)
    assert engine.calls == [["p0"], ["p1"], ["p2"]]


def grouped(*batch: Ticket, group_size: int = 8) -> list[list[str]]:
    groups = sampling_groups(batch, group_size)
    return [[t.request.request_id for t in group if t.request] for group in groups]


def test_prompts_that_share_their_sampling_go_together() -> None:
    warm, hot = Sampling(do_sample=True, temperature=0.7), Sampling(do_sample=True, temperature=1.2)
    assert grouped(ticket("a", warm), ticket("b", hot), ticket("c", warm), ticket("d", hot)) == [
        ["a", "c"],
        ["b", "d"],
    ]


def test_greedy_prompts_share_a_group_whatever_their_temperature() -> None:
    assert grouped(
        ticket("a", Sampling(temperature=0.2)),
        ticket("b", Sampling(temperature=1.7, top_p=0.3)),
        ticket("c", Sampling(do_sample=True, temperature=0)),
        ticket("d", Sampling(do_sample=True, top_p=0)),
    ) == [["a", "b", "c", "d"]]


@pytest.mark.parametrize(
    "other",
    [
        Sampling(do_sample=True, temperature=0.7, top_p=0.9),
        Sampling(do_sample=True, temperature=0.8),
        Sampling(do_sample=True, temperature=0.7, repetition_penalty=1.1),
        Sampling(do_sample=False, temperature=0.7),
    ],
)
def test_prompts_of_different_sampling_are_apart(other: Sampling) -> None:
    one = Sampling(do_sample=True, temperature=0.7)
    assert grouped(ticket("a", one), ticket("b", other)) == [["a"], ["b"]]


def test_caps_do_not_part_prompts() -> None:
    assert grouped(ticket("a", Sampling(4)), ticket("b", Sampling(400))) == [["a", "b"]]


def test_prompts_with_and_without_audio_are_apart() -> None:
    assert grouped(ticket("a", clip=CLIP), ticket("b"), ticket("c", clip=CLIP)) == [
        ["a", "c"],
        ["b"],
    ]


def test_a_sampled_prompt_with_a_seed_is_alone() -> None:
    seeded = Sampling(do_sample=True, seed=1)
    assert grouped(ticket("a", seeded), ticket("b", seeded)) == [["a"], ["b"]]


def test_a_greedy_prompt_with_a_seed_is_not() -> None:
    assert grouped(ticket("a", Sampling(seed=1)), ticket("b", Sampling())) == [["a", "b"]]


def test_a_group_is_cut_at_its_size() -> None:
    assert grouped(*tickets(5), group_size=2) == [["p0", "p1"], ["p2", "p3"], ["p4"]]


async def test_the_rows_of_a_call_pay_the_same() -> None:
    batch = [ticket("a", Sampling(1)), ticket("b", Sampling(5)), ticket("c", Sampling(3))]
    meter = await run(FakeEngine(continuous=False, step_seconds=0.002), batch)
    assert len({ticket.elapsed_seconds for ticket in batch}) == 1
    assert paid(batch) == pytest.approx(meter.busy_seconds, abs=1e-9)


async def test_a_group_that_runs_out_of_memory_is_halved_down_to_what_fits() -> None:
    engine = FakeEngine(continuous=False, fail=failing(99, EngineOutOfMemoryError, above=2))
    batch = tickets(8)
    await run(engine, batch)
    assert [len(call) for call in engine.calls] == [8, 4, 2, 2, 4, 2, 2]
    assert [ticket.finish_reason for ticket in batch] == ["length"] * 8


async def test_a_prompt_that_runs_out_of_memory_alone_is_failed_alone() -> None:
    engine = FakeEngine(continuous=False, fail=failing(99, EngineOutOfMemoryError, naming="p1"))
    batch = tickets(3)
    await run(engine, batch)
    assert [type(ticket.error) for ticket in batch] == [
        type(None),
        EngineOutOfMemoryError,
        type(None),
    ]


async def test_any_other_error_of_a_group_falls_back_to_one_at_a_time() -> None:
    engine = FakeEngine(continuous=False, fail=failing(1, EngineError, above=1))
    batch = tickets(4)
    await run(engine, batch)
    assert [len(call) for call in engine.calls] == [4, 1, 1, 1, 1]
    assert [ticket.finish_reason for ticket in batch] == ["length"] * 4


async def test_an_error_of_one_prompt_is_that_prompts_alone() -> None:
    engine = FakeEngine(continuous=False, fail=failing(9, EngineError, naming="p2"))
    batch = tickets(4)
    await run(engine, batch)
    assert [ticket.error is None for ticket in batch] == [True, True, False, True]


async def test_a_failed_attempt_is_paid_by_its_rows_and_the_half_that_waits_is_outside() -> None:
    engine = FakeEngine(
        continuous=False, step_seconds=0.01, fail=failing(1, EngineOutOfMemoryError, above=2)
    )
    batch = tickets(4, Sampling(max_new_tokens=2))
    meter = await run(engine, batch)
    assert paid(batch) == pytest.approx(meter.busy_seconds, abs=1e-9)
    assert max(t.elapsed_seconds for t in batch) < 0.75 * meter.busy_seconds


async def test_two_batches_never_overlap_on_a_static_engine() -> None:
    engine = FakeEngine(continuous=False, step_seconds=0.001)
    scheduler = scheduler_on(engine, Meter())
    one, two = [ticket("a")], [ticket("b")]
    await asyncio.gather(
        *(
            scheduler.run(batch, group_size=None, timeout_seconds=9, party=Party())
            for batch in (one, two)
        )
    )
    assert engine.most_inside == 1


class Slow:
    """The making of a request that takes its time."""

    def __init__(self, one: Ticket, seconds: float) -> None:
        self._make, self._seconds = one.make_request, seconds

    async def __call__(self) -> EngineRequest:
        await asyncio.sleep(self._seconds)
        return await self._make()


async def test_a_prompt_whose_own_song_is_slow_does_not_hold_up_the_others() -> None:
    engine = FakeEngine(continuous=False)
    batch = tickets(3)
    batch[1].make_request = Slow(batch[1], 1.5)
    await run(engine, batch, timeout_seconds=1.0)
    assert [ticket.finish_reason for ticket in batch] == ["length", None, "length"]
    assert isinstance(batch[1].error, DeadlineExceededError)
    assert engine.calls == [["p0", "p2"]]


# Both engines.

both = pytest.mark.parametrize("continuous", [True, False], ids=["continuous", "static"])


@both
async def test_shares_sum_to_the_engines_busy_time(continuous: bool) -> None:
    batch = [ticket(f"p{i}", Sampling(max_new_tokens=1 + i)) for i in range(13)]
    meter = await run(FakeEngine(continuous=continuous, step_seconds=0.001), batch, group_size=4)
    assert paid(batch) == pytest.approx(meter.busy_seconds, abs=1e-9)
    assert meter.billed_seconds == pytest.approx(meter.busy_seconds, abs=1e-9)


@both
async def test_a_prompt_whose_input_is_at_fault_never_enters_and_the_others_stand(
    continuous: bool,
) -> None:
    async def refuse() -> EngineRequest:
        raise UnprocessableError("too long", field="prompts.1.prompt")

    engine = FakeEngine(continuous=continuous)
    batch = [ticket("a"), Ticket(refuse), ticket("c")]
    await run(engine, batch)
    assert [t.finish_reason for t in batch] == ["length", None, "length"]
    assert batch[1].elapsed_seconds == 0
    assert batch[1].error is not None
    assert batch[1].error.__traceback__ is None  # its frames would keep songs in memory
    assert sorted(name for call in engine.calls for name in call) == ["a", "c"]


@both
async def test_past_the_deadline_what_is_finished_stands_and_the_rest_is_stopped(
    continuous: bool,
) -> None:
    engine = FakeEngine(continuous=continuous, step_seconds=0.01)
    batch = [ticket("a", Sampling(1)), ticket("b", Sampling(9999))]
    meter = await run(engine, batch, group_size=1, timeout_seconds=0.2)
    assert batch[0].finish_reason == "length"
    assert isinstance(batch[1].error, DeadlineExceededError)
    assert engine.aborted == ["b"]
    assert not engine.inside
    assert paid(batch) == pytest.approx(meter.busy_seconds, abs=1e-9)


@both
async def test_cancelling_a_batch_stops_its_work_and_settles_its_time(continuous: bool) -> None:
    engine = FakeEngine(continuous=continuous, step_seconds=0.01)
    meter = Meter()
    scheduler = scheduler_on(engine, meter)
    batch = tickets(3, Sampling(max_new_tokens=9999))
    task = asyncio.create_task(
        scheduler.run(batch, group_size=None, timeout_seconds=99, party=Party())
    )
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(engine.aborted) == ["p0", "p1", "p2"]
    assert meter.num_inside == 0
    assert paid(batch) == pytest.approx(meter.busy_seconds, abs=1e-9) and paid(batch) > 0.04


class SlowToStop(FakeEngine):
    """An engine whose step goes on for a while after its abort."""

    async def generate(
        self, prepared: Sequence[EngineRequest]
    ) -> AsyncGenerator[EngineOutput, None]:
        try:
            async for output in super().generate(prepared):
                yield output
        finally:
            await asyncio.shield(asyncio.sleep(0.3))


@both
async def test_an_aborted_prompt_does_not_pay_for_the_step_that_was_running(
    continuous: bool,
) -> None:
    engine = SlowToStop(continuous=continuous, step_seconds=0.01)
    one = ticket("a", Sampling(max_new_tokens=9999))
    await run(engine, [one], timeout_seconds=0.1)
    assert one.elapsed_seconds == pytest.approx(0.1, abs=0.05)


# The engine dies.


@both
async def test_prompts_of_a_dead_engine_are_answered_by_the_next(continuous: bool) -> None:
    engine = FakeEngine(continuous=continuous, fail=failing(1, EngineDeadError))
    batch = tickets(3)
    await run(engine, batch)
    assert [ticket.finish_reason for ticket in batch] == ["length"] * 3


@both
async def test_suspects_are_tried_one_at_a_time(continuous: bool) -> None:
    num_calls = 3 if continuous else 1
    engine = FakeEngine(
        continuous=continuous, step_seconds=0.01, fail=failing(num_calls, EngineDeadError)
    )
    batch = tickets(3)
    await run(engine, batch)
    assert [ticket.finish_reason for ticket in batch] == ["length"] * 3
    assert engine.calls[num_calls:] == [["p0"], ["p1"], ["p2"]]


@both
async def test_a_prompt_that_kills_the_engine_twice_is_failed_and_the_others_are_answered(
    continuous: bool,
) -> None:
    engine = FakeEngine(
        continuous=continuous, step_seconds=0.01, fail=failing(99, EngineDeadError, naming="p1")
    )
    batch = tickets(3)
    await run(engine, batch)
    assert [ticket.finish_reason for ticket in batch] == ["length", None, "length"]
    assert isinstance(batch[1].error, EngineCrashedError)
    assert sum("p1" in call for call in engine.calls) == 2


async def test_one_death_is_reported_once_however_many_prompts_notice_it() -> None:
    engine = FakeEngine(continuous=True, fail=failing(3, EngineDeadError))
    engines = Fixed(engine)
    scheduler = Scheduler(engines, Meter(), continuous=True, max_num_seqs=64, max_group_size=8)
    await scheduler.run(tickets(3), group_size=None, timeout_seconds=9, party=Party())
    assert engines.deaths == [engine]


class DiesAfter(FakeEngine):
    """An engine that shows life for `step_seconds`, is silent for a while, and is found dead."""

    dead = False

    async def generate(
        self, prepared: Sequence[EngineRequest]
    ) -> AsyncGenerator[EngineOutput, None]:
        if self.dead:
            async for output in super().generate(prepared):
                yield output
            return
        await asyncio.sleep(0.1)
        for request in prepared:
            yield EngineOutput(request.request_id, (7,), None, 3, 0)
        await asyncio.sleep(0.2)
        self.dead = True
        raise EngineDeadError("found dead")


async def test_the_time_between_the_last_output_and_the_notice_of_death_is_nobodys() -> None:
    one = ticket("a", Sampling(max_new_tokens=1))
    meter = await run(DiesAfter(continuous=True), [one])
    assert one.elapsed_seconds == pytest.approx(0.1, abs=0.05)
    assert meter.lost_seconds == pytest.approx(0.2, abs=0.05)
    assert one.elapsed_seconds == pytest.approx(meter.busy_seconds, abs=1e-9)
    assert one.token_ids == [7]  # the dead engine's word is forgotten
