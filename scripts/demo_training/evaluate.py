"""How often the model is right about fresh songs: greedy answers that are true to the letter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from demo_training.hearing import answer_logits, hear
from demo_training.lessons import IGNORED, Course, Lesson, Rows
from demo_training.stages import Trainee, count_right, prefill_song, shares

SEED = 1_000_000  # of no lesson
THEORY = "music_theory"
NUM_THEORY_TOKENS = 12  # of {"key":"C","mode":"minor","bpm":120

WHOLE = ("tempo", "key", "chords", "lead", "instruments", "parts", "description")
LOOK_UPS = ("second", "second", "part at second", "part begins", "part's lead")
LATE = (*WHOLE, *LOOK_UPS, "late second", "late second")
PRESETS = (THEORY, "catalog_metadata")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: the songs, and what is asked of each."""

    name: str
    course: Course


ROWS = (
    Row("one part, 6 to 12 s", Course(4, (6, 12), (1, 1), WHOLE + LOOK_UPS, PRESETS, 2, 0.0)),
    Row(
        "one to three parts, 12 to 30 s",
        Course(4, (12, 30), (1, 3), WHOLE + LOOK_UPS, PRESETS, 2, 0.0),
    ),
    Row("several parts, 31 to 60 s", Course(4, (31, 60), (2, 5), LATE, PRESETS, 2, 0.0)),
    Row("several parts, 61 to 90 s", Course(4, (61, 90), (3, 5), LATE, PRESETS, 2, 0.0)),
    Row("moments of 10 to 30 s", Course(4, (10, 30), (2, 5), WHOLE + LOOK_UPS, PRESETS, 2, 1.0)),
)


@torch.no_grad()
def evaluate(trainee: Trainee, row: Row, num_songs: int) -> dict[str, float]:
    """The share of right answers by what was asked; a "late second" is one past 30."""
    trainee.model.eval()
    counts: Counter[str] = Counter()
    for lesson in fresh_lessons(trainee, row, num_songs):
        audio = hear(trainee.model, lesson.features, lesson.seconds)
        cache = prefill_song(trainee, audio)
        for rows in lesson.rows:
            logits = answer_logits(trainee.model, cache, rows.token_ids)
            counts.update(count_right(logits, rows))
            counts.update(count_theory(logits, rows))
    return {name.removesuffix("?"): share for name, share in shares(counts).items()}


def count_theory(logits: Tensor, rows: Rows) -> Counter[str]:
    """Whether the key, the mode and the tempo are right in music_theory's answers."""
    counts: Counter[str] = Counter()
    for song, kinds in enumerate(rows.kinds):
        if THEORY not in kinds:
            continue
        index = kinds.index(THEORY)
        answer = rows.labels[song, index] != IGNORED
        right = logits[song, index].argmax(-1)[answer] == rows.labels[song, index][answer]
        counts["music_theory: key and tempo? right"] += int(right[:NUM_THEORY_TOKENS].all())
        counts["music_theory: key and tempo? asked"] += 1
    return counts


def fresh_lessons(trainee: Trainee, row: Row, num_songs: int) -> Iterator[Lesson]:
    for index in range(num_songs // row.course.num_songs):
        yield trainee.scribe.write(np.random.default_rng([SEED, index]), row.course)
