"""Songs that were decoded a while ago, for the next request about the same bytes."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from adapter.decoder import Song

KEPT_SECONDS = 600.0

SongKey = tuple[bytes | None, str]  # whose it is (Client.cache_key), and the digest of its bytes


@dataclass(frozen=True, slots=True)
class _Kept:
    """`until` is in monotonic seconds."""

    song: Song
    until: float


class SongCache:
    """Decoded songs of at most `max_bytes` together, each for ten minutes from its last use.

    A song is found by the bytes of its file, and by whoever sent it alone.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        kept_seconds: float = KEPT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._kept_seconds = kept_seconds
        self._clock = clock
        self._kept: OrderedDict[SongKey, _Kept] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: SongKey) -> Song | None:
        self._drop_old()
        kept = self._kept.get(key)
        if kept is None:
            return None
        self.put(key, kept.song)  # it was used: its time starts anew
        return kept.song

    def put(self, key: SongKey, song: Song) -> None:
        self._drop(key)
        if song.samples.nbytes > self._max_bytes:
            return
        self._kept[key] = _Kept(song, self._clock() + self._kept_seconds)
        self._num_bytes += song.samples.nbytes
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def _drop_old(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: SongKey) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_bytes -= kept.song.samples.nbytes
