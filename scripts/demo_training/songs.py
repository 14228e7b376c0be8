"""Songs by a program, whose tempo, key and parts are known: drums, bass, chords and a lead.

The same generator state makes the same song.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from demo_training.sounds import LEADS, RATE_HZ, Samples, drum, note

Mode = Literal["major", "minor"]
Kind = Literal["silence", "intro", "verse", "chorus", "bridge", "outro"]

TONICS = ("C", "Db", "D", "Eb", "E", "F", "Gb", "G", "Ab", "A", "Bb", "B")
MODES: tuple[Mode, ...] = ("major", "minor")
KINDS: tuple[Kind, ...] = ("intro", "verse", "chorus", "bridge", "outro")  # in a song's order
# A part lasts whole bars of 4/4 and whole seconds: so many seconds for each tempo, or a multiple.
UNIT_SECONDS = {80: 3, 96: 5, 120: 2, 144: 5}
TEMPOS = tuple(UNIT_SECONDS)
SHORTEST_PART_SECONDS = 5

Degree = tuple[int, str]  # semitones above the tonic, "" for a major chord or "m" for a minor one
PROGRESSIONS: dict[Mode, tuple[tuple[Degree, ...], ...]] = {
    "major": (((0, ""), (5, ""), (7, ""), (0, "")), ((0, ""), (9, "m"), (5, ""), (7, ""))),
    "minor": (((0, "m"), (5, "m"), (7, "m"), (0, "m")), ((0, "m"), (8, ""), (5, "m"), (7, "m"))),
}


@dataclass(frozen=True, slots=True)
class Sound:
    """Which instruments a kind of part has beside the piano, which plays in all."""

    drums: bool = False
    hats: bool = False
    bass: bool = False
    lead: bool = False


SOUNDS: dict[Kind, Sound] = {
    "intro": Sound(),
    "verse": Sound(drums=True, bass=True, lead=True),
    "chorus": Sound(drums=True, hats=True, bass=True, lead=True),
    "bridge": Sound(bass=True, lead=True),
    "outro": Sound(bass=True),
}


@dataclass(frozen=True, slots=True)
class Key:
    tonic: int  # semitones above C
    mode: Mode

    def __str__(self) -> str:
        return f"{TONICS[self.tonic]} {self.mode}"


@dataclass(frozen=True, slots=True)
class Part:
    kind: Kind
    start_seconds: float
    end_seconds: float
    lead: str | None = None

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True, eq=False)
class MadeSong:
    """`samples` is float32 of shape (num_samples,), mono at 16 kHz, in [-1, 1].

    The parts cover the song without a gap. `progression` indexes PROGRESSIONS of the mode. A song
    that `is_cut` is a moment of another one: its times begin at 0, its music anywhere in a bar.
    """

    samples: Samples
    tempo_bpm: int
    key: Key
    progression: int
    parts: tuple[Part, ...]
    is_cut: bool = False

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE_HZ

    @property
    def sounding(self) -> tuple[Part, ...]:
        """The parts that are no silence."""
        return tuple(part for part in self.parts if part.kind != "silence")

    @property
    def chords(self) -> tuple[str, ...]:
        degrees = PROGRESSIONS[self.key.mode][self.progression]
        return tuple(TONICS[(self.key.tonic + up) % 12] + suffix for up, suffix in degrees)

    def part(self, kind: str) -> Part | None:
        return next((part for part in self.parts if part.kind == kind), None)

    def part_at(self, second: int) -> Part | None:
        """The part that holds all of the second; None where it ends within it, or the song does."""
        return next(
            (p for p in self.parts if p.start_seconds <= second and second + 1 <= p.end_seconds),
            None,
        )


def make_song(rng: np.random.Generator, seconds: int, num_parts: int) -> MadeSong:
    """A song of so many seconds and at most so many parts, as many as fit; silence comes extra."""
    tempo_bpm = int(rng.choice(TEMPOS))
    key = Key(int(rng.integers(12)), MODES[int(rng.integers(2))])
    progression = int(rng.integers(2))
    parts = draw_parts(rng, tempo_bpm, seconds, num_parts)
    samples = np.zeros(seconds * RATE_HZ, np.float32)
    for part in parts:
        if part.kind != "silence":
            _play(rng, samples, part, tempo_bpm, key, PROGRESSIONS[key.mode][progression])
    samples *= rng.uniform(0.4, 0.9) / np.abs(samples).max()
    samples += rng.uniform(-1.0, 1.0, len(samples)).astype(np.float32) * 10 ** rng.uniform(-5, -3)
    return MadeSong(samples, tempo_bpm, key, progression, parts)


def cut_song(song: MadeSong, start_seconds: float, end_seconds: float) -> MadeSong:
    """A moment of a song, as the server cuts it: its times begin at 0."""
    start, end = round(start_seconds * RATE_HZ), round(end_seconds * RATE_HZ)
    heard = tuple(
        replace(
            part,
            start_seconds=max(part.start_seconds - start_seconds, 0.0),
            end_seconds=min(part.end_seconds, end_seconds) - start_seconds,
        )
        for part in song.parts
        if part.start_seconds < end_seconds and part.end_seconds > start_seconds
    )
    return replace(song, samples=song.samples[start:end], parts=heard, is_cut=True)


def draw_parts(
    rng: np.random.Generator, tempo_bpm: int, seconds: int, num_parts: int
) -> tuple[Part, ...]:
    """Parts in the order of KINDS, each kind at most once and each with a lead of its own.

    Sometimes silence stands before one of them. The last part takes what is left of the seconds.
    """
    pause = int(rng.integers(1, 4)) if rng.random() < 0.3 else 0
    pause = min(pause, seconds - SHORTEST_PART_SECONDS)
    unit = UNIT_SECONDS[tempo_bpm]
    least = -(-SHORTEST_PART_SECONDS // unit)
    units = (seconds - pause) // unit
    num_parts = max(1, min(num_parts, units // least))
    spare = rng.multinomial(max(0, units - least * num_parts), [1 / num_parts] * num_parts)
    lengths = [unit * (least + int(more)) for more in spare]
    kinds = [KINDS[index] for index in sorted(rng.permutation(len(KINDS))[:num_parts])]
    leads = rng.permutation(LEADS)
    paused = int(rng.integers(num_parts)) if pause else -1
    parts: list[Part] = []
    at = 0.0
    for index, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
        if index == paused and pause > 0:
            parts.append(Part("silence", at, at + pause))
            at += pause
        end = float(seconds) if index == num_parts - 1 else at + length
        parts.append(Part(kind, at, end, str(leads[index]) if SOUNDS[kind].lead else None))
        at = end
    return tuple(parts)


def _play(
    rng: np.random.Generator,
    samples: Samples,
    part: Part,
    tempo_bpm: int,
    key: Key,
    degrees: tuple[Degree, ...],
) -> None:
    """Add a part's notes to the samples; its harmony begins anew with it."""
    room = samples[: round(part.end_seconds * RATE_HZ)]
    sound, beat_seconds = SOUNDS[part.kind], 60 / tempo_bpm
    _add(room, part.start_seconds, drum("crash"), 0.35)
    for index in range(round(part.seconds / beat_seconds) + 1):
        at = part.start_seconds + index * beat_seconds
        if at >= part.end_seconds - 1e-6:
            break
        up, suffix = degrees[index // 4 % 4]
        root = (key.tonic + up) % 12
        triad = (root, root + (3 if suffix else 4), root + 7)
        for pitch in triad:
            _add(room, at, note("piano", 60 + pitch, beat_seconds), 0.3)
        if sound.bass:
            _add(room, at, note("bass", 48 + root, beat_seconds), 0.7)
        if sound.drums:
            _add(room, at, drum("kick" if index % 2 == 0 else "snare"), 0.6)
        if sound.hats:
            _add(room, at, drum("hat"), 0.7)
            _add(room, at + beat_seconds / 2, drum("hat"), 0.7)
        if part.lead:
            for offset, length, pitch in _melody(rng, triad):
                sounds = note(part.lead, 72 + pitch % 12, length * beat_seconds)
                _add(room, at + offset * beat_seconds, sounds, 0.9)


def _melody(
    rng: np.random.Generator, triad: tuple[int, int, int]
) -> Iterator[tuple[float, float, int]]:
    """A beat of the lead: one note of the chord or two; (offset and length in beats, pitch)."""
    ends = (0.0, 0.5, 1.0) if rng.random() < 0.35 else (0.0, 1.0)
    for start, end in pairwise(ends):
        yield start, end - start, int(rng.choice(triad))


def _add(room: Samples, at_seconds: float, sound: Samples, loudness: float) -> None:
    start = round(at_seconds * RATE_HZ)
    length = min(len(sound), len(room) - start)
    if length > 0:
        room[start : start + length] += loudness * sound[:length]
