"""`Idempotency-Key`: a request that is sent again gets the answer of the first, and is billed once.

An answer is kept for ten minutes from its end; while it is being made, those who ask again wait
for it too.
"""

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

from adapter.errors import UnprocessableError

HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotency-Replayed"
KEPT_SECONDS = 600.0
MAX_KEPT_BYTES = 64 * 2**20
MAX_KEPT_REPLIES = 10_000

_READ_BYTES = 2**20
_KEY = re.compile(r"[ -~]{1,255}")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it goes to the client: the body is JSON."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class _Kept:
    """A finished reply; `until` is in monotonic seconds."""

    digest: bytes
    reply: Reply
    until: float


@dataclass(slots=True, eq=False)
class _Running:
    digest: bytes
    task: "asyncio.Task[Reply]"
    num_waiting: int = 0


def idempotency_key(sent: Sequence[str]) -> str | None:
    """The key among the values of the header, if any. Raises UnprocessableError for a bad one."""
    if not sent:
        return None
    if len(sent) > 1 or not _KEY.fullmatch(sent[0]):
        raise UnprocessableError(
            f"{HEADER} must be sent once, with 1 to 255 printable ASCII characters; "
            "a random UUID does well",
            code="invalid_value",
            field=HEADER,
        )
    return sent[0]


def request_digest(route: str, body: object, upload: BinaryIO | None) -> bytes:
    """SHA-256 of what a request asks for: its route, its JSON value and its file, not their form.

    Reads the file and leaves it at its start; for a thread, since both may be large.
    """
    digest = hashlib.sha256()
    _add_value(digest, [route, body])
    if upload is not None:
        digest.update(b"file:")
        upload.seek(0)
        while piece := upload.read(_READ_BYTES):
            digest.update(piece)
        upload.seek(0)
    return digest.digest()


def _add_value(digest: "hashlib._Hash", value: object) -> None:
    """Every value with its type and its length before it, so that no two read the same."""
    if isinstance(value, str):
        data = value.encode()
        digest.update(b"s%d:" % len(data))
        digest.update(data)
    elif isinstance(value, dict):
        digest.update(b"{%d:" % len(value))
        for name in sorted(value):
            _add_value(digest, name)
            _add_value(digest, value[name])
    elif isinstance(value, list):
        digest.update(b"[%d:" % len(value))
        for item in value:
            _add_value(digest, item)
    else:
        digest.update(f"{value!r};".encode())


class Replies:
    """Replies by key: those being made, and those that were.

    Each client has replies of its own. The oldest go first where there are too many, or too many
    bytes of them; one that is being made always stays.
    """

    def __init__(
        self,
        *,
        kept_seconds: float = KEPT_SECONDS,
        max_replies: int = MAX_KEPT_REPLIES,
        max_bytes: int = MAX_KEPT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept_seconds = kept_seconds
        self._max_replies = max_replies
        self._max_bytes = max_bytes
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0

    async def reply(
        self,
        key: str,
        digest: bytes,
        make: Callable[[], Coroutine[Any, Any, Reply]],
        files: ExitStack,
    ) -> tuple[Reply, bool]:
        """The reply for the key, and whether it is another request's.

        `make` runs once, in a task of its own that is cancelled when the last who waits for it has
        left; it then owns `files` and closes them. What it raises goes to all who wait and is not
        kept, and neither is a reply of 500 or more. Raises UnprocessableError of code
        `idempotency_mismatch` where the key came with another digest.
        """
        self._drop_old()
        before = self._running.get(key) or self._kept.get(key)
        if before is not None and before.digest != digest:
            raise UnprocessableError(
                f"this {HEADER} came before with another body; send a new key with a new request",
                code="idempotency_mismatch",
                field=HEADER,
            )
        if isinstance(before, _Kept):
            return before.reply, True
        running = before or self._start(key, digest, make, files)
        return await self._wait(key, running), before is not None

    def _start(
        self,
        key: str,
        digest: bytes,
        make: Callable[[], Coroutine[Any, Any, Reply]],
        files: ExitStack,
    ) -> _Running:
        owned = files.pop_all()
        task = asyncio.create_task(self._make(key, digest, make))
        # Not in the task: one that is cancelled at once never runs.
        task.add_done_callback(lambda _: owned.close())
        running = self._running[key] = _Running(digest, task)
        return running

    async def _make(
        self,
        key: str,
        digest: bytes,
        make: Callable[[], Coroutine[Any, Any, Reply]],
    ) -> Reply:
        task = asyncio.current_task()
        try:
            reply = await make()
        finally:
            running = self._running.get(key)
            wanted = running is not None and running.task is task
            if wanted:
                del self._running[key]
        if wanted and reply.status < 500:
            self._keep(key, _Kept(digest, reply, self._clock() + self._kept_seconds))
        return reply

    async def _wait(self, key: str, running: _Running) -> Reply:
        running.num_waiting += 1
        try:
            await asyncio.wait([running.task])
            return running.task.result()
        finally:
            running.num_waiting -= 1
            if running.num_waiting == 0 and not running.task.done():
                del self._running[key]
                running.task.cancel()
                await asyncio.wait([running.task])

    def _keep(self, key: str, kept: _Kept) -> None:
        self._kept[key] = kept
        self._num_bytes += len(kept.reply.body)
        while len(self._kept) > self._max_replies or self._num_bytes > self._max_bytes:
            self._drop_first()

    def _drop_old(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._drop_first()

    def _drop_first(self) -> None:
        _, kept = self._kept.popitem(last=False)
        self._num_bytes -= len(kept.reply.body)
