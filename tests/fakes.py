"""A small engine for what a real one cannot be made to do on command."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from adapter.engine import Engine, EngineName
from adapter.errors import EngineError
from adapter.request import EngineOutput, EngineRequest


class FakeEngine:
    """Answers token 7 up to each request's cap, one step at a time.

    `fail` is asked at each call with the requests' ids and may raise. The lists say what happened:
    the ids of each call, of those inside at each call's start, and of aborted requests.
    """

    def __init__(
        self,
        *,
        continuous: bool,
        step_seconds: float = 0.0,
        fail: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        self.name: EngineName = "vllm" if continuous else "transformers"
        self.continuous = continuous
        self._step_seconds = step_seconds
        self._fail = fail
        self.calls: list[list[str]] = []
        self.inside: set[str] = set()
        self.most_inside = 0
        self.aborted: list[str] = []

    async def prepare(self, request: EngineRequest) -> EngineRequest:
        return request

    async def generate(
        self, prepared: Sequence[EngineRequest]
    ) -> AsyncGenerator[EngineOutput, None]:
        ids = [request.request_id for request in prepared]
        self.calls.append(ids)
        self.inside |= set(ids)
        self.most_inside = max(self.most_inside, len(self.inside))
        try:
            self._fail(ids)
            for _ in range(max(request.sampling.max_new_tokens for request in prepared)):
                await asyncio.sleep(self._step_seconds)
            for request in prepared:
                yield _answer(request)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += ids
            raise
        finally:
            self.inside -= set(ids)

    async def check_health(self) -> None:
        return None

    def last_progress_at(self) -> float:
        return 0.0

    def kill(self) -> bool:
        return False

    async def shutdown(self) -> None:
        return None


class Fixed:
    """Always the same engine; notes the deaths that are reported."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.deaths: list[Engine] = []
        self.answers = 0

    async def running(self) -> Engine:
        return self._engine

    def report_death(self, engine: Engine) -> None:
        self.deaths.append(engine)

    def note_answer(self) -> None:
        self.answers += 1


def _answer(request: EngineRequest) -> EngineOutput:
    return EngineOutput(
        request_id=request.request_id,
        token_ids=(7,) * request.sampling.max_new_tokens,
        finish_reason="length",
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=0,
    )


def failing(
    times: int, error: type[EngineError], *, above: int = 0, naming: str | None = None
) -> Callable[[Sequence[str]], None]:
    """Raise in the first `times` calls of more than `above` requests (that name one request)."""
    left = [times]

    def fail(ids: Sequence[str]) -> None:
        if left[0] == 0 or len(ids) <= above or (naming is not None and naming not in ids):
            return
        left[0] -= 1
        raise error("planted")

    return fail
