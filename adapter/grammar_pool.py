"""Has a worker process compile grammars before an engine gets them, and remembers the outcome."""

import asyncio
import contextlib
import json
import logging
import sys
from collections import OrderedDict

from adapter.errors import UnavailableError, UnprocessableError
from adapter.worker_pool import worker_environment

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 256
_LINE_BYTES = 2**20


class GrammarPool:
    """One worker, started with the first grammar; one that takes too long is killed, and another
    started for the next."""

    def __init__(
        self,
        checkpoint_path: str,
        vocab_size: int,
        *,
        memory_limit_bytes: int = 2**30,
        timeout_seconds: float = 30.0,
        start_seconds: float = 120.0,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._start_seconds = start_seconds
        self._program = (
            *(sys.executable, "-m", "adapter.grammar_worker", checkpoint_path),
            *(str(vocab_size), str(memory_limit_bytes), str(round(timeout_seconds))),
        )
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._known: OrderedDict[str, str | None] = OrderedDict()

    async def check(self, grammar: str) -> None:
        """Raises UnprocessableError where an engine should not be given this grammar, and
        UnavailableError where no worker can be had."""
        async with self._lock:
            if grammar not in self._known:
                self._known[grammar] = await self._ask(grammar)
            self._known.move_to_end(grammar)
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
            why = self._known[grammar]
        if why is not None:
            raise UnprocessableError(
                f"json_schema {why}; send a simpler one: fewer properties, shorter strings and "
                "lists, patterns without repeats inside repeats.",
                code="invalid_schema",
                field="json_schema",
            )

    async def close(self) -> None:
        """End the worker. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, grammar: str) -> str | None:
        try:
            if self._process is None:
                await self._start()
            async with asyncio.timeout(self._timeout_seconds):
                answer = await self._exchange(json.dumps(grammar))
        except TimeoutError:
            await self.close()
            logger.warning("a grammar took longer than %g s to compile", self._timeout_seconds)
            return "takes too long to compile"
        except BaseException:  # a client that left: the worker's answer must not be the next one's
            await self.close()
            raise
        if not answer:
            await self.close()
            logger.warning("a grammar ended its compiler")
            return "takes more time or memory to compile than is allowed"
        why: str | None = json.loads(answer)
        return why

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=worker_environment() | {"HF_HUB_OFFLINE": "1"},
            limit=_LINE_BYTES,
        )
        ready = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._start_seconds):
                ready = await self._read()
        if ready != b"ready\n":
            raise UnavailableError("The compiler of schemas did not start; try again.")

    async def _exchange(self, line: str) -> bytes:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()
        except OSError:
            return b""
        return await self._read()

    async def _read(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        return await self._process.stdout.readline()
