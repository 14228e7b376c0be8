"""Small real audio files, and the ways in which they are broken."""

import functools
import random
import struct
from collections.abc import Callable

from tests.songs import encode, melody

SONG_SECONDS = 0.5
FORMATS = (
    "wav-u8",
    "wav-16",
    "wav-alaw",
    "rf64",
    "aiff",
    "caf",
    "flac",
    "alac",
    "mp3",
    "ogg-vorbis",
    "opus",
    "webm-opus",
    "m4a",
    "aac-adts",
    "mp4-video",
    "wma",
    "wavpack",
    "mka-flac",
)
LIES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
HEAD_BYTES = 512  # most of what a decoder believes stands at the start

Edit = Callable[[random.Random, bytes], bytes]


@functools.cache
def small_songs() -> dict[str, bytes]:
    """Half a second of music in each format, by the format's name."""
    return {
        name: encode(melody(SONG_SECONDS, rate, 2), name, rate=rate)
        for name, rate in ((name, _rate(name)) for name in FORMATS)
    }


def _rate(name: str) -> int:
    return 48_000 if "opus" in name else 44_100


def mutated(rng: random.Random) -> bytes:
    """One of the songs after one to four edits."""
    data = rng.choice(list(small_songs().values()))
    for _ in range(rng.randint(1, 4)):
        data = rng.choice(EDITS)(rng, data)
    return data


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    flipped = bytearray(data)
    for _ in range(rng.randint(1, 16) if data else 0):
        flipped[_place(rng, data) % len(data)] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: _place(rng, data)]


def behead(rng: random.Random, data: bytes) -> bytes:
    return data[_place(rng, data) :]


def cut_out(rng: random.Random, data: bytes) -> bytes:
    start = _place(rng, data)
    return data[:start] + data[start + rng.randint(1, 64) :]


def splice(rng: random.Random, data: bytes) -> bytes:
    """The start of one song and the rest of another, mostly of another format."""
    other = rng.choice(list(small_songs().values()))
    return data[: _place(rng, data)] + other[_place(rng, other) :]


def lie(rng: random.Random, data: bytes) -> bytes:
    """A number that stands in for a size, a count or a rate."""
    width = rng.choice("BHI")
    size = struct.calcsize(width)
    number = rng.choice(LIES) & (256**size - 1)
    start = _place(rng, data)
    return data[:start] + struct.pack(rng.choice("<>") + width, number) + data[start + size :]


def repeat(rng: random.Random, data: bytes) -> bytes:
    """A block many times over: chunks, pages and frames that should be there once."""
    start = _place(rng, data)
    block = data[start : start + rng.randint(1, 4096)]
    return data[:start] + block * rng.randint(2, 50) + data[start:]


def wipe(rng: random.Random, data: bytes) -> bytes:
    start = _place(rng, data)
    size = min(rng.randint(1, 256), len(data) - start)
    return data[:start] + bytes([rng.choice((0, 0xFF))]) * size + data[start + size :]


def _place(rng: random.Random, data: bytes) -> int:
    if rng.random() < 0.5:
        return rng.randint(0, min(HEAD_BYTES, len(data)))
    return rng.randint(0, len(data))


EDITS: tuple[Edit, ...] = (flip_bits, truncate, behead, cut_out, splice, lie, repeat, wipe)
