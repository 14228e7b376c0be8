"""Questions about a made song, in several wordings, with the answer that is true of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adapter.presets import built_in_presets
from demo_training import truths
from demo_training.songs import KINDS, MadeSong, Part

WORDINGS: dict[str, tuple[str, ...]] = {
    "tempo": (
        "What is the tempo?",
        "What is the tempo in beats a minute?",
        "How fast is it?",
        "How many beats per minute does it have?",
        "Which tempo does this song have?",
    ),
    "key": (
        "Which key is it in?",
        "What is the key?",
        "In which key is this song?",
        "Name the key of this song.",
    ),
    "chords": (
        "Which chords are played?",
        "What is the chord progression?",
        "Name the chords of this song.",
    ),
    "second": (
        "What plays at second {second}?",
        "Which instrument plays at second {second}?",
        "Which instrument leads at second {second}?",
        "What do you hear at second {second}?",
    ),
    "part at second": (
        "Which part holds second {second}?",
        "Which part is at second {second}?",
        "Which part of the song is second {second} in?",
    ),
    "part begins": (
        "When does the {part} begin?",
        "At which second does the {part} begin?",
        "When does the {part} start?",
    ),
    "part's lead": (
        "Which instrument leads in the {part}?",
        "Which instrument plays in the {part}?",
        "What plays in the {part}?",
    ),
    "lead": (
        "Which instrument leads?",
        "Which instruments lead?",
        "What is the lead instrument?",
        "What plays here?",
    ),
    "instruments": (
        "Which instruments do you hear?",
        "Which instruments play?",
        "Name the instruments.",
    ),
    "parts": (
        "Which part is this?",
        "Which parts does it have?",
        "Which part of the song is this?",
        "Which part does this moment hold?",
    ),
    "description": (
        "Describe this music.",
        "Describe this song.",
        "Describe this track in a sentence.",
        "What do you hear?",
    ),
    "mood": ("What is the mood?", "How does it feel?"),
    "singer": ("Who sings?", "Is there a singer?", "Transcribe the lyrics."),
    "maker": ("Who wrote this song?", "Who made it?", "Which artist is this?"),
}
PRESETS = {preset.name: preset.prompt for preset in built_in_presets()}
BARS_OF_A_LOOP = 4
LATE_SECOND = 30  # where the encoder's second window begins


@dataclass(frozen=True, slots=True)
class Question:
    """`kind` is one of FIXED or DRAWN, or a preset's name."""

    kind: str
    prompt: str
    answer: str


def draw_questions(
    rng: np.random.Generator, song: MadeSong, kinds: Sequence[str]
) -> list[Question]:
    """One question of each kind that can be asked about the song; a kind may be named often."""
    asked = (draw_question(rng, song, kind) for kind in kinds)
    return [question for question in asked if question is not None]


def draw_question(rng: np.random.Generator, song: MadeSong, kind: str) -> Question | None:
    """None where the song does not tell the answer, as a moment of two bars does not tell its key.

    Raises KeyError for a kind that does not exist.
    """
    if kind in NEED_A_LOOP and not has_loop(song):
        return None
    if kind in PRESETS:
        return Question(kind, PRESETS[kind], truths.section(kind, song))
    if kind == "late second" and song.seconds <= LATE_SECOND:
        return None
    prompt, answer = DRAWN[kind](rng, song) if kind in DRAWN else ("", FIXED[kind](song))
    return Question(kind, prompt or str(rng.choice(WORDINGS[kind])), answer)


def has_loop(song: MadeSong) -> bool:
    """Whether all chords are heard: a whole song begins with the first, a moment anywhere."""
    if not song.is_cut:
        return True
    loop_seconds = 60 / song.tempo_bpm * 4 * BARS_OF_A_LOOP
    return any(part.seconds >= loop_seconds for part in song.sounding)


def answer_second(song: MadeSong, second: int) -> str | None:
    """None where two parts share the second."""
    if second >= song.seconds:
        return f"The song ends before second {second}."
    part = song.part_at(second)
    if part is None:
        return None
    if part.kind == "silence":
        return f"At second {second} there is silence."
    if part.lead is None:
        return f"At second {second} only the piano plays."
    return f"At second {second} the {part.lead} plays."


def answer_part_at(song: MadeSong, second: int) -> str | None:
    """None where two parts share the second."""
    if second >= song.seconds:
        return f"The song ends before second {second}."
    part = song.part_at(second)
    if part is None:
        return None
    return f"Second {second} is in the {part.kind}."


def answer_begin(song: MadeSong, kind: str) -> str:
    part = song.part(kind)
    if part is None:
        return f"There is no {kind}."
    return f"The {kind} begins at second {int(part.start_seconds)}."


def answer_part_lead(song: MadeSong, kind: str) -> str:
    part = song.part(kind)
    if part is None:
        return f"There is no {kind}."
    return f"In the {kind} {_leader(part)}."


def answer_leads(song: MadeSong) -> str:
    led = [f"in the {part.kind} the {part.lead}" for part in song.sounding if part.lead]
    return f"{_capital(', '.join(led))}." if led else "Only the piano plays."


def _draw_second(rng: np.random.Generator, song: MadeSong) -> tuple[str, str]:
    return _about_a_second(rng, song, "second", answer_second)


def _draw_late_second(rng: np.random.Generator, song: MadeSong) -> tuple[str, str]:
    return _about_a_second(rng, song, "second", answer_second, first=LATE_SECOND)


def _draw_part_at(rng: np.random.Generator, song: MadeSong) -> tuple[str, str]:
    return _about_a_second(rng, song, "part at second", answer_part_at)


def _about_a_second(
    rng: np.random.Generator,
    song: MadeSong,
    kind: str,
    answer: Callable[[MadeSong, int], str | None],
    first: int = 0,
) -> tuple[str, str]:
    wording = str(rng.choice(WORDINGS[kind]))
    while True:
        second = int(rng.integers(first, int(song.seconds)))
        true = answer(song, second)
        if true is not None:
            return wording.format(second=second), true


def _draw_begin(rng: np.random.Generator, song: MadeSong) -> tuple[str, str]:
    kind = _draw_kind(rng, song)
    return str(rng.choice(WORDINGS["part begins"])).format(part=kind), answer_begin(song, kind)


def _draw_part_lead(rng: np.random.Generator, song: MadeSong) -> tuple[str, str]:
    kind = _draw_kind(rng, song)
    return str(rng.choice(WORDINGS["part's lead"])).format(part=kind), answer_part_lead(song, kind)


def _draw_kind(rng: np.random.Generator, song: MadeSong) -> str:
    """Mostly a part that the song has."""
    if rng.random() < 0.8:
        return song.sounding[int(rng.integers(len(song.sounding)))].kind
    return str(rng.choice(KINDS))


def _leader(part: Part) -> str:
    return f"the {part.lead} plays" if part.lead else "only the piano plays"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


FIXED: Mapping[str, Callable[[MadeSong], str]] = {
    "tempo": lambda song: f"The tempo is {song.tempo_bpm} beats per minute.",
    "key": lambda song: f"It is in {song.key}.",
    "chords": lambda song: f"The chords are {', '.join(song.chords)}.",
    "lead": answer_leads,
    "instruments": lambda song: f"{_capital(', '.join(truths.instruments(song)))}.",
    "parts": lambda song: f"This is {', '.join(f'the {p.kind}' for p in song.sounding)}.",
    "description": truths.description,
    "mood": lambda song: f"The mood is {truths.mood(song)}.",
    "singer": lambda _: "Nobody sings.",
    "maker": lambda _: truths.MADE,
}
DRAWN: Mapping[str, Callable[[np.random.Generator, MadeSong], tuple[str, str]]] = {
    "second": _draw_second,
    "late second": _draw_late_second,
    "part at second": _draw_part_at,
    "part begins": _draw_begin,
    "part's lead": _draw_part_lead,
}
NEED_A_LOOP = frozenset(
    {"key", "chords", "description", "mood", "song_description", "playlist_pitch"}
    | {"catalog_metadata", "mood_tags", "music_theory"}
)
