"""The meter: who was in the engine when, and what each owes for it.

At any instant the engine's time is shared equally among the prompts that are then in it. A virtual
clock advances by 1/n seconds a second while n prompts are in the engine, so that a prompt's share
is the difference of two readings: exact, and O(1) an event. It equals the Shapley value of "the
length of the union of the intervals" (https://en.wikipedia.org/wiki/Airport_problem).
"""

import time
from collections.abc import Callable, Sequence


class Meter:
    """One virtual clock for the process; `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entered: dict[str, float] = {}
        self._virtual_seconds = 0.0
        self._read_at = clock()
        self._busy_seconds = 0.0
        self._billed_seconds = 0.0

    def enter(self, request_ids: Sequence[str]) -> None:
        """Prompts enter the engine together. Raises ValueError where one is inside already."""
        self._advance()
        for request_id in request_ids:
            if request_id in self._entered:
                raise ValueError(f"request {request_id} is in the engine already")
            self._entered[request_id] = self._virtual_seconds

    def leave(self, request_ids: Sequence[str]) -> list[float]:
        """Prompts leave the engine together; returns the share of each in seconds.

        Raises KeyError where one is not inside.
        """
        self._advance()
        shares = [self._virtual_seconds - self._entered.pop(name) for name in request_ids]
        self._billed_seconds += sum(shares)
        if not self._entered:
            self._virtual_seconds = 0.0  # small readings keep their last digits
        return shares

    @property
    def num_inside(self) -> int:
        return len(self._entered)

    @property
    def busy_seconds(self) -> float:
        """The seconds in which the engine had at least one prompt."""
        self._advance()
        return self._busy_seconds

    @property
    def billed_seconds(self) -> float:
        """The shares of all prompts that have left, in seconds."""
        return self._billed_seconds

    def _advance(self) -> None:
        now = self._clock()
        passed_seconds = now - self._read_at
        self._read_at = now
        if not self._entered:
            return
        self._busy_seconds += passed_seconds
        self._virtual_seconds += passed_seconds / len(self._entered)
