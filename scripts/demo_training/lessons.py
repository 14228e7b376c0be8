"""What a training step takes: songs of one length, what is true of each second, and questions.

A lesson follows from its seed, stage and number alone, so that training can go on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from demo_training.hearing import EMBEDDINGS_A_SECOND, SPARE_FRAMES, WINDOW_SECONDS
from demo_training.questions import Question, draw_questions, has_loop
from demo_training.songs import KINDS, MODES, TEMPOS, TONICS, MadeSong, cut_song, make_song
from demo_training.sounds import LEADS, RATE_HZ

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IGNORED = -100  # a label that counts for nothing
HOP = RATE_HZ // 100
MAX_CUT_SECONDS = 20  # how much longer a song is than the moment that is cut from it


@dataclass(frozen=True, slots=True)
class Course:
    """What a stage's lessons are like. `kinds` are asked of each song, in short rows; `num_presets`
    are drawn from `presets` (some are there more often), in long ones."""

    num_songs: int
    seconds: tuple[int, int]
    num_parts: tuple[int, int]
    kinds: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    num_presets: int = 0
    cut_share: float = 0.3


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """`token_ids` and `labels` are (num_songs, num_questions, length); the label of a position is
    the token behind it, where that belongs to an answer. `kinds` name each song's questions."""

    token_ids: Tensor
    labels: Tensor
    kinds: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """`features` as hearing.hear takes them; `truths` (num_songs, seconds) for each of HEADS."""

    features: Tensor
    seconds: int
    truths: dict[str, Tensor]
    rows: tuple[Rows, ...]


HEADS = {  # what an embedding tells of its second, and how many classes there are
    "tempo": len(TEMPOS),
    "loop": 48,  # a key and one of its two progressions
    "chord": 24,
    "lead": len(LEADS) + 1,
    "part": len(KINDS) + 1,
    "begins": 2,
}


class Lessons(Dataset[Lesson]):
    """The lessons of a stage, by their number."""

    def __init__(
        self, course: Course, seed: tuple[int, int], num_lessons: int, scribe: Scribe
    ) -> None:
        self._course, self._seed, self._num_lessons = course, seed, num_lessons
        self._scribe = scribe

    def __len__(self) -> int:
        return self._num_lessons

    def __getitem__(self, index: int) -> Lesson:
        rng = np.random.default_rng([*self._seed, index])
        return self._scribe.write(rng, self._course)


class Scribe:
    """Writes lessons with the checkpoint's own tokenizer and feature extractor."""

    def __init__(self, processor: Any) -> None:
        self._tokenizer: PreTrainedTokenizerFast = processor.tokenizer
        self._extractor = processor.feature_extractor
        rendered = processor.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "audio", "path": "song"},
                        {"type": "text", "text": "QUESTION"},
                    ],
                }
            ],
            add_generation_prompt=True,
        )
        before, _, behind = rendered.partition("QUESTION")
        opening, _, closing = before.partition(processor.audio_token)
        bos, eos = processor.audio_bos_token, processor.audio_eos_token
        self.before_audio = self._encode(opening + bos)
        self.behind_audio = self._encode(eos + closing)
        self._turn = self._encode(behind)
        self._end = [self._tokenizer.eos_token_id]

    def write(self, rng: np.random.Generator, course: Course) -> Lesson:
        seconds = int(rng.integers(course.seconds[0], course.seconds[1] + 1))
        songs = [draw_song(rng, course, seconds) for _ in range(course.num_songs)]
        short = [draw_questions(rng, song, course.kinds) for song in songs]
        drawn = [_draw_presets(rng, course) for _ in songs]
        long = [draw_questions(rng, song, kinds) for song, kinds in zip(songs, drawn, strict=True)]
        rows = tuple(self.write_rows(asked) for asked in (short, long) if any(asked))
        truths = {name: torch.stack([find_truths(song)[name] for song in songs]) for name in HEADS}
        return Lesson(self.extract(songs, seconds), seconds, truths, rows)

    def extract(self, songs: Sequence[MadeSong], seconds: int) -> Tensor:
        """Log-mel features as the processor makes them, window by window, cut behind the sound."""
        pieces = []
        for start in range(0, seconds, WINDOW_SECONDS):
            length = min(WINDOW_SECONDS, seconds - start)
            frames = length * 100 + (0 if length == WINDOW_SECONDS else SPARE_FRAMES)
            heard = slice(start * RATE_HZ, (start + length) * RATE_HZ)
            made = self._extractor(
                [song.samples[heard] for song in songs],
                sampling_rate=RATE_HZ,
                padding="max_length",
                max_length=frames * HOP + (0 if length == WINDOW_SECONDS else 4 * HOP),
                return_tensors="pt",
            )
            pieces.append(made["input_features"][:, :, :frames])
        return torch.cat(pieces, dim=2)

    def write_rows(self, asked: Sequence[Sequence[Question]]) -> Rows:
        """Rows of songs with fewer questions than others are filled up with empty ones."""
        written = [[self._row(question) for question in questions] for questions in asked]
        height = max(len(rows) for rows in written)
        width = max(len(ids) for rows in written for ids, _ in rows) - 1
        token_ids = torch.full((len(asked), height, width), self._tokenizer.pad_token_id)
        labels = torch.full((len(asked), height, width), IGNORED)
        for song, rows in enumerate(written):
            for index, (ids, start) in enumerate(rows):
                token_ids[song, index, : len(ids) - 1] = torch.tensor(ids[:-1])
                labels[song, index, start - 1 : len(ids) - 1] = torch.tensor(ids[start:])
        kinds = tuple(tuple(question.kind for question in questions) for questions in asked)
        return Rows(token_ids, labels, kinds)

    def _row(self, question: Question) -> tuple[list[int], int]:
        """The token ids behind the audio, and where the answer starts in them."""
        start = [*self._encode(question.prompt), *self._turn]
        return [*start, *self._encode(question.answer), *self._end], len(start)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def draw_song(rng: np.random.Generator, course: Course, seconds: int) -> MadeSong:
    """A whole song of so many seconds, or a moment of a longer one."""
    num_parts = int(rng.integers(course.num_parts[0], course.num_parts[1] + 1))
    if rng.random() >= course.cut_share:
        return make_song(rng, seconds, num_parts)
    more = int(rng.integers(1, MAX_CUT_SECONDS + 1))
    song = make_song(rng, seconds + more, num_parts)
    start = float(rng.integers(0, more + 1))
    if rng.random() < 0.3:
        start = min(float(more), start + float(rng.integers(100)) / 100)
    return cut_song(song, start, start + seconds)


def find_truths(song: MadeSong) -> dict[str, Tensor]:
    """For each of HEADS, the class of each second; IGNORED where a second holds two."""
    seconds = [_truths_at(song, second) for second in range(int(song.seconds))]
    return {name: torch.tensor([truths.get(name, IGNORED) for truths in seconds]) for name in HEADS}


def _truths_at(song: MadeSong, second: int) -> dict[str, int]:
    part = song.part_at(second)
    if part is None:
        return {}
    if part.kind == "silence":
        return {"lead": 0, "part": 0, "begins": 0}
    key = song.key
    truths = {
        "tempo": TEMPOS.index(song.tempo_bpm),
        "lead": LEADS.index(part.lead) + 1 if part.lead else 0,
        "part": KINDS.index(part.kind) + 1,
    }
    if has_loop(song):
        truths["loop"] = key.tonic + 12 * MODES.index(key.mode) + 24 * song.progression
    if song.is_cut:
        return truths
    truths["begins"] = int(part.start_seconds == second)
    bars = [(at - part.start_seconds) * song.tempo_bpm / 240 for at in (second, second + 1)]
    if int(bars[0]) == int(bars[1] - 1e-6):
        chord = song.chords[int(bars[0]) % 4]
        truths["chord"] = TONICS.index(chord.removesuffix("m")) + 12 * chord.endswith("m")
    return truths


def _draw_presets(rng: np.random.Generator, course: Course) -> list[str]:
    if not course.num_presets:
        return []
    drawn = rng.choice(course.presets, course.num_presets, replace=False)
    return list(dict.fromkeys(str(kind) for kind in drawn))


assert EMBEDDINGS_A_SECOND * 4 == 100  # frames a second
