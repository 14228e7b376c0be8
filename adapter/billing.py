"""The meter: who was in the engine when, and what each owes for it.

At any instant the engine's time is shared equally among the prompts that are then in it. A virtual
clock advances by 1/n seconds a second while n prompts are in the engine, so that a prompt's share
is the difference of two readings: exact, and O(1) an event. It equals the Shapley value of "the
length of the union of the intervals" (https://en.wikipedia.org/wiki/Airport_problem).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Reading:
    """The meter at one moment: the clock, the virtual clock and the busy time, in seconds."""

    at: float
    virtual_seconds: float
    busy_seconds: float


class Meter:
    """One virtual clock for the process; `clock` returns monotonic seconds.

    A reading is certain once an engine has shown life at it (an output) or a share was settled
    by it. When an engine dies, time goes back to the last certain reading.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entered: dict[str, float] = {}
        self._now = self._certain = _Reading(clock(), 0.0, 0.0)
        self._billed_seconds = 0.0
        self._lost_seconds = 0.0

    def enter(self, request_ids: Sequence[str]) -> None:
        """Prompts enter the engine together. Raises ValueError where one is inside already."""
        idle = not self._entered
        self._advance()
        if idle:
            self._certain = self._now
        for request_id in request_ids:
            if request_id in self._entered:
                raise ValueError(f"request {request_id} is in the engine already")
            self._entered[request_id] = self._now.virtual_seconds

    def mark(self) -> None:
        """The engine has shown life: what has passed until here is certain."""
        self._advance()
        self._certain = self._now

    def leave(self, request_ids: Sequence[str]) -> list[float]:
        """Prompts leave the engine together; returns the share of each in seconds.

        Raises KeyError where one is not inside.
        """
        self.mark()
        return self._settle(request_ids)

    def die(self) -> dict[str, float]:
        """The engine has died: all prompts left it at its last certain reading; returns the share
        of each. The time since then is lost and billed to nobody."""
        died_at = self._clock()
        self._now = self._certain
        if self._entered:
            self._lost_seconds += died_at - self._now.at
        inside = list(self._entered)
        return dict(zip(inside, self._settle(inside), strict=True))

    @property
    def num_inside(self) -> int:
        return len(self._entered)

    @property
    def certain_at(self) -> float:
        """The clock's last certain reading."""
        return self._certain.at

    @property
    def busy_seconds(self) -> float:
        """The seconds in which the engine had at least one prompt, up to the last certain reading:
        it never goes back, and while nobody is inside it equals `billed_seconds`."""
        return self._certain.busy_seconds

    @property
    def billed_seconds(self) -> float:
        """The shares of all prompts that have left, in seconds."""
        return self._billed_seconds

    @property
    def lost_seconds(self) -> float:
        """The time between dead engines' last outputs and the notice of their death."""
        return self._lost_seconds

    def _settle(self, request_ids: Sequence[str]) -> list[float]:
        # One that entered after the last certain reading of a dead engine owes nothing.
        shares = [
            max(0.0, self._now.virtual_seconds - self._entered.pop(name)) for name in request_ids
        ]
        self._billed_seconds += sum(shares)
        if not self._entered:  # small readings keep their last digits
            self._now = self._certain = _Reading(self._now.at, 0.0, self._now.busy_seconds)
        return shares

    def _advance(self) -> None:
        now = self._clock()
        passed_seconds = now - self._now.at
        count = len(self._entered)
        self._now = _Reading(
            now,
            self._now.virtual_seconds + (passed_seconds / count if count else 0.0),
            self._now.busy_seconds + (passed_seconds if count else 0.0),
        )
