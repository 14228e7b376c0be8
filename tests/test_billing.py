"""The billing rule: at any instant the engine's time is shared equally among those inside."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.billing import Meter


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> Meter:
    return Meter(clock)


def test_a_prompt_alone_pays_its_whole_time(meter: Meter, clock: Clock) -> None:
    meter.enter("a")
    clock.seconds += 2.5
    assert meter.leave("a") == [2.5]


def test_prompts_that_enter_and_leave_together_pay_the_same(meter: Meter, clock: Clock) -> None:
    meter.enter("abcd")
    clock.seconds += 2.0
    assert meter.leave("abcd") == [0.5] * 4


class RunningClock(Clock):
    """A clock that goes on between two readings, as a real one does."""

    def __call__(self) -> float:
        self.seconds += 1e-6
        return self.seconds


def test_those_who_leave_in_one_call_pay_the_same_to_the_last_bit() -> None:
    meter = Meter(RunningClock())
    meter.enter("abc")
    assert len(set(meter.leave("abc"))) == 1


def test_overlapping_prompts_share_only_the_overlap(meter: Meter, clock: Clock) -> None:
    meter.enter("a")
    clock.seconds += 1.0
    meter.enter("b")
    clock.seconds += 1.0
    assert meter.leave("a") == [1.5]
    clock.seconds += 1.0
    assert meter.leave("b") == [1.5]


def test_idle_time_is_billed_to_nobody(meter: Meter, clock: Clock) -> None:
    meter.enter("a")
    clock.seconds += 1.0
    meter.leave("a")
    clock.seconds += 100.0
    meter.enter("b")
    clock.seconds += 1.0
    assert meter.leave("b") == [1.0]
    assert meter.busy_seconds == meter.billed_seconds == 2.0


def test_busy_seconds_run_with_each_sign_of_life(meter: Meter, clock: Clock) -> None:
    meter.enter("a")
    clock.seconds += 3.0
    meter.mark()
    clock.seconds += 2.0
    assert meter.busy_seconds == 3.0
    assert meter.billed_seconds == 0.0


def test_a_dead_engines_prompts_leave_at_its_last_output(meter: Meter, clock: Clock) -> None:
    meter.enter("ab")
    clock.seconds += 2.0
    meter.mark()
    clock.seconds += 60.0
    assert meter.die() == {"a": 1.0, "b": 1.0}
    assert meter.busy_seconds == meter.billed_seconds == 2.0
    assert meter.lost_seconds == 60.0
    assert meter.num_inside == 0


def test_who_entered_after_a_dead_engines_last_output_owes_nothing(
    meter: Meter, clock: Clock
) -> None:
    meter.enter("a")
    clock.seconds += 2.0
    meter.mark()
    clock.seconds += 1.0
    meter.enter("b")
    clock.seconds += 1.0
    assert meter.die() == {"a": 2.0, "b": 0.0}


def test_what_was_settled_before_a_death_stays_settled(meter: Meter, clock: Clock) -> None:
    meter.enter("ab")
    clock.seconds += 2.0
    assert meter.leave("a") == [1.0]
    clock.seconds += 9.0
    assert meter.die() == {"b": 1.0}
    assert meter.busy_seconds == meter.billed_seconds == 2.0


def test_an_engine_that_dies_idle_loses_nothing(meter: Meter, clock: Clock) -> None:
    clock.seconds += 5.0
    assert meter.die() == {}
    assert meter.lost_seconds == 0.0


def test_after_a_death_the_next_prompt_starts_from_nothing(meter: Meter, clock: Clock) -> None:
    meter.enter("a")
    clock.seconds += 1.0
    meter.die()
    clock.seconds += 50.0
    meter.enter("a")
    clock.seconds += 1.5
    assert meter.leave("a") == [1.5]
    assert meter.busy_seconds == 1.5


def test_a_prompt_may_come_back_after_it_left(meter: Meter, clock: Clock) -> None:
    meter.enter("a")
    clock.seconds += 1.0
    (first,) = meter.leave("a")
    clock.seconds += 5.0
    meter.enter("a")
    clock.seconds += 2.0
    (second,) = meter.leave("a")
    assert first + second == 3.0


def test_entering_twice_is_refused(meter: Meter) -> None:
    meter.enter("a")
    with pytest.raises(ValueError, match="a is in the engine already"):
        meter.enter("a")


def test_leaving_without_entering_is_refused(meter: Meter) -> None:
    with pytest.raises(KeyError):
        meter.leave("a")


Interval = tuple[float, float]
seconds = st.floats(min_value=0, max_value=1e4, allow_nan=False)
intervals = st.lists(st.tuples(seconds, seconds).map(sorted).map(tuple), min_size=1, max_size=20)


def sweep(schedule: list[Interval]) -> list[float]:
    """The rule by brute force: cut time at every event and share each piece among those inside."""
    events = sorted({moment for interval in schedule for moment in interval})
    shares = [0.0] * len(schedule)
    for start, end in itertools.pairwise(events):
        inside = [i for i, (enter, leave) in enumerate(schedule) if enter <= start and end <= leave]
        for i in inside:
            shares[i] += (end - start) / len(inside)
    return shares


def metered(schedule: list[Interval]) -> tuple[list[float], Meter]:
    """The same schedule through the meter. At one instant, those who enter come first."""
    clock = Clock()
    meter = Meter(clock)
    events = [(enter, 0, i) for i, (enter, _) in enumerate(schedule)]
    events += [(leave, 1, i) for i, (_, leave) in enumerate(schedule)]
    shares = [0.0] * len(schedule)
    for moment, kind, i in sorted(events):
        clock.seconds = moment
        if kind == 0:
            meter.enter([str(i)])
        else:
            (shares[i],) = meter.leave([str(i)])
    return shares, meter


@given(intervals)
def test_the_shares_equal_a_brute_force_sweep(schedule: list[Interval]) -> None:
    shares, _ = metered(schedule)
    assert shares == pytest.approx(sweep(schedule), abs=1e-6)


@given(intervals)
def test_the_shares_sum_to_the_busy_time(schedule: list[Interval]) -> None:
    shares, meter = metered(schedule)
    assert math.fsum(shares) == pytest.approx(meter.busy_seconds, rel=1e-9, abs=1e-9)
    assert meter.billed_seconds == pytest.approx(meter.busy_seconds, rel=1e-9, abs=1e-9)


@given(intervals)
def test_a_prompt_never_pays_more_than_its_own_time(schedule: list[Interval]) -> None:
    shares, _ = metered(schedule)
    for share_seconds, (enter, leave) in zip(shares, schedule, strict=True):
        assert share_seconds <= leave - enter + 1e-9


Event = tuple[str, float, int]  # what happens, after how many seconds, to whom
events = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "leave", "mark", "die"]),
        st.floats(min_value=0, max_value=100),
        st.integers(min_value=0, max_value=7),
    ),
    max_size=40,
)


def replay(schedule: list[Event]) -> tuple[list[Interval], Meter, float]:
    """Play events to a meter; returns the intervals in which prompts were inside by the rule, and
    the sum of the shares that the meter gave them."""
    clock = Clock()
    meter = Meter(clock)
    entered: dict[str, float] = {}
    intervals: list[Interval] = []
    certain = clock.seconds
    paid = 0.0
    for kind, after_seconds, who in [*schedule, ("die", 0.0, 0)]:
        clock.seconds += after_seconds
        name = str(who)
        if kind == "enter" and name not in entered:
            certain = certain if entered else clock.seconds
            entered[name] = clock.seconds
            meter.enter([name])
        elif kind == "leave" and name in entered:
            certain = clock.seconds
            intervals.append((entered.pop(name), certain))
            paid += sum(meter.leave([name]))
        elif kind == "mark":
            certain = clock.seconds
            meter.mark()
        elif kind == "die":
            intervals += [(start, max(start, certain)) for start in entered.values()]
            entered.clear()
            paid += sum(meter.die().values())
    return intervals, meter, paid


@given(events)
def test_with_deaths_the_shares_still_sum_to_the_busy_time(schedule: list[Event]) -> None:
    intervals, meter, paid = replay(schedule)
    assert paid == pytest.approx(sum(sweep(intervals)), rel=1e-9, abs=1e-7)
    assert paid == pytest.approx(meter.busy_seconds, rel=1e-9, abs=1e-7)
    assert paid == pytest.approx(meter.billed_seconds, rel=1e-9, abs=1e-7)
