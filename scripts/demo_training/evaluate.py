"""How often the model is right about fresh songs: greedy answers that are true to the letter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from demo_training.hearing import answer_logits, hear
from demo_training.lessons import IGNORED, Course, Lesson
from demo_training.stages import Trainee, count_right, prefill_song, shares

SEED = 1_000_000  # of no lesson
NUM_THEORY_TOKENS = 12  # of {"key":"C","mode":"minor","bpm":120: the key and the tempo


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: so many songs of a kind, and what is asked of each."""

    name: str
    course: Course
    num_songs: int = 200


WHOLE = ("tempo", "key", "chords", "lead", "instruments", "parts", "description")
SECONDS = ("second", "second", "part at second", "part begins", "part's lead")
PRESETS = ("music_theory", "catalog_metadata")
ROWS = (
    Row("one part, 6 to 12 s", Course(4, (6, 12), (1, 1), WHOLE + SECONDS, cut_share=0.0)),
    Row("to 30 s", Course(4, (12, 30), (1, 3), WHOLE + SECONDS, PRESETS, 2, cut_share=0.0)),
    Row("several parts, 30 to 60 s", Course(4, (30, 60), (2, 5), WHOLE + SECONDS, PRESETS, 2, 0.0)),
    Row("several parts, 60 to 90 s", Course(4, (60, 90), (3, 5), WHOLE + SECONDS, PRESETS, 2, 0.0)),
    Row("moments of 10 to 30 s", Course(4, (10, 30), (2, 5), WHOLE + SECONDS, cut_share=1.0)),
)


@torch.no_grad()
def evaluate(trainee: Trainee, row: Row) -> dict[str, float]:
    """The share of right answers by what was asked; "late second" are those past 30."""
    trainee.model.eval()
    counts: Counter[str] = Counter()
    for lesson in lessons(trainee, row):
        audio = hear(trainee.model, lesson.features, lesson.seconds)
        cache = prefill_song(trainee, audio)
        for rows in lesson.rows:
            logits = answer_logits(trainee.model, cache, rows.token_ids)
            counts.update(count_right(logits, rows))
    return {name.removesuffix("?"): share for name, share in shares(counts).items()}


def lessons(trainee: Trainee, row: Row) -> Iterator[Lesson]:
    for index in range(0, row.num_songs, row.course.num_songs):
        yield trainee.scribe.write(np.random.default_rng([SEED, index]), row.course)
