"""Songs that need not be decoded again: bounded in bytes and time, and nobody else's."""

import numpy as np

from adapter.decoder import Song
from adapter.song_cache import SongCache


class Clock:
    """A monotonic clock that stands until it is set."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def song(num_bytes: int) -> Song:
    return Song(np.zeros(num_bytes // 4, np.float32), 1.0, "digest of the samples", 0.1)


def test_a_song_is_found_by_its_bytes_and_its_owner_alone() -> None:
    cache = SongCache(1000)
    mine = song(400)
    cache.put((b"ann", "digest"), mine)
    assert cache.get((b"ann", "digest")) is mine
    assert cache.get((b"bob", "digest")) is None
    assert cache.get((None, "digest")) is None
    assert cache.get((b"ann", "other")) is None


def test_the_one_that_was_not_used_for_longest_gives_way() -> None:
    cache = SongCache(1000)
    for name in ("one", "two"):
        cache.put((None, name), song(400))
    cache.get((None, "one"))
    cache.put((None, "three"), song(400))
    assert [name for name in ("one", "two", "three") if cache.get((None, name))] == ["one", "three"]


def test_a_song_past_the_limit_is_not_kept_and_drives_nobody_out() -> None:
    cache = SongCache(1000)
    cache.put((None, "small"), song(400))
    cache.put((None, "large"), song(1004))
    assert cache.get((None, "small")) and not cache.get((None, "large"))


def test_a_song_that_comes_again_takes_its_room_once() -> None:
    cache = SongCache(1000)
    for _ in range(10):
        cache.put((None, "one"), song(400))
    cache.put((None, "two"), song(400))
    assert cache.get((None, "one")) and cache.get((None, "two"))


def test_a_song_is_forgotten_ten_minutes_after_its_last_use() -> None:
    clock = Clock()
    cache = SongCache(1000, clock=clock)
    cache.put((None, "one"), song(400))
    for clock.seconds in (599.0, 1198.0):
        assert cache.get((None, "one"))
    clock.seconds += 600.0
    assert cache.get((None, "one")) is None
