"""What each key may have in flight, and use in a day."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from adapter.errors import TooManyRequestsError

DAY_SECONDS = 86_400


class Quotas:
    """What each key has in flight and has used today; a day is UTC's.

    A prompt that runs is never cut short: the day's last prompts may go past its seconds.
    """

    def __init__(
        self,
        *,
        max_prompts: int | None,
        max_seconds_per_day: float | None,
        used_today: Mapping[str, float],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_prompts = max_prompts
        self._max_seconds = max_seconds_per_day
        self._clock = clock
        self._num_inside: Counter[str] = Counter()
        self._num_bodies: Counter[str] = Counter()
        self._day = self._today()
        self._used_seconds = dict(used_today)

    @contextmanager
    def admit(self, name: str | None, num_prompts: int) -> Iterator[None]:
        """The block has the prompts in flight. Raises TooManyRequestsError past a limit."""
        if name is None:
            yield
            return
        self._check_prompts(name, num_prompts)
        self._check_seconds(name)
        self._num_inside[name] += num_prompts
        try:
            yield
        finally:
            self._num_inside[name] -= num_prompts

    @contextmanager
    def receive(self, name: str | None) -> Iterator[None]:
        """The block receives a body: a key has as many on their way as it may have prompts."""
        if name is None or self._max_prompts is None:
            yield
            return
        if self._num_bodies[name] >= self._max_prompts:
            raise TooManyRequestsError(
                f"this key may have {self._max_prompts} requests on their way; finish one first",
                code="too_many_prompts",
            )
        self._num_bodies[name] += 1
        try:
            yield
        finally:
            self._num_bodies[name] -= 1

    def spend(self, name: str | None, elapsed_seconds: float) -> None:
        if name is None:
            return
        self._turn_day()
        self._used_seconds[name] = self._used_seconds.get(name, 0.0) + elapsed_seconds

    def _check_prompts(self, name: str, num_prompts: int) -> None:
        inside = self._num_inside[name]
        if self._max_prompts is None or inside + num_prompts <= self._max_prompts:
            return
        raise TooManyRequestsError(
            f"this key may have {self._max_prompts} prompts in flight and has {inside}: "
            f"{num_prompts} more do not fit; wait for an answer, or send fewer",
            code="too_many_prompts",
        )

    def _check_seconds(self, name: str) -> None:
        self._turn_day()
        used = self._used_seconds.get(name, 0.0)
        if self._max_seconds is None or used < self._max_seconds:
            return
        left_seconds = DAY_SECONDS - int(self._clock()) % DAY_SECONDS
        raise TooManyRequestsError(
            f"this key has used {used:.1f} of its {self._max_seconds:g} seconds of the day; "
            "they start anew at midnight UTC",
            code="daily_limit_reached",
            retry_after_seconds=left_seconds,
        )

    def _turn_day(self) -> None:
        if self._today() != self._day:
            self._day = self._today()
            self._used_seconds.clear()

    def _today(self) -> int:
        return int(self._clock() // DAY_SECONDS)
