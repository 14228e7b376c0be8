"""What the rows of a `generate()` call are given, step by step, for the event loop."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from adapter.request import EngineOutput


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a call, as its outputs name it."""

    request_id: str
    prompt_tokens: int
    stream: bool


class RowSteps:
    """Brings each step's tokens from the thread that decodes to `outputs`, until `finish`.

    A row's last token is left to the call's own output, which says how the row ended.
    """

    def __init__(self, rows: Sequence[Row], eos_token_ids: Collection[int]) -> None:
        self._rows = rows
        self._eos_token_ids = eos_token_ids
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[list[EngineOutput] | None] = asyncio.Queue()
        self._cached_tokens: Sequence[int] = [0] * len(rows)
        self._begin()

    def _begin(self) -> None:
        self._num_told = [0] * len(self._rows)
        self._ended = [not row.stream for row in self._rows]

    def start(self, cached_tokens: Sequence[int]) -> None:
        """A call begins, and what an earlier try of it said does not count."""
        self._cached_tokens = cached_tokens
        told = [index for index, num_told in enumerate(self._num_told) if num_told]
        self._put([self._output(index, (), starts_over=True) for index in told])
        self._begin()

    def add(self, token_ids: Sequence[int], ended: Sequence[bool]) -> None:
        """A step gave each row a token, with which some ended; after its end a row gets padding."""
        outputs = []
        for index, token_id in enumerate(token_ids):
            if self._ended[index]:
                continue
            if ended[index] or token_id in self._eos_token_ids:
                self._ended[index] = True
                continue
            self._num_told[index] += 1
            outputs.append(self._output(index, (token_id,)))
        self._put(outputs)

    def finish(self) -> None:
        """End `outputs`; from the event loop's thread, when the call is done."""
        self._queue.put_nowait(None)

    def num_told(self, index: int) -> int:
        """The tokens of a row that were told already."""
        return self._num_told[index]

    async def next(self) -> list[EngineOutput] | None:
        """What was said since, None once the call is done."""
        return await self._queue.get()

    def _output(
        self, index: int, token_ids: tuple[int, ...], *, starts_over: bool = False
    ) -> EngineOutput:
        row = self._rows[index]
        return EngineOutput(
            request_id=row.request_id,
            token_ids=token_ids,
            finish_reason=None,
            prompt_tokens=row.prompt_tokens,
            cached_tokens=self._cached_tokens[index],
            starts_over=starts_over,
        )

    def _put(self, outputs: list[EngineOutput]) -> None:
        if outputs:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, outputs)
