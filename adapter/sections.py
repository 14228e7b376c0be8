"""The sections of a report that are JSON: models whose schemas hold the answers to their form.

Every string, list and number is bounded, and texts are of characters of one or two bytes: a valid
answer has no more bytes than its preset has tokens, and no token is shorter than a byte.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_PLAIN = r"[ !#-\[\]-~]"  # ASCII that needs no escape in JSON
_NAME = r"[ !#-\[\]-~\u00c0-\u024f]"  # and Latin letters with accents: two bytes


Word = Annotated[str, Field(pattern=f"^{_PLAIN}{{1,16}}$")]
Phrase = Annotated[str, Field(pattern=f"^{_PLAIN}{{1,32}}$")]
Sentence = Annotated[str, Field(pattern=f"^{_PLAIN}{{1,80}}$")]
Name = Annotated[str, Field(pattern=f"^{_NAME}{{1,28}}$")]
Percent = Annotated[int, Field(ge=0, le=100)]
Bpm = Annotated[int, Field(ge=30, le=300)]
Moment = Annotated[int, Field(ge=0, le=3600)]  # seconds behind the start

Key = Literal[
    "C", "C#", "Db", "D", "D#", "Eb", "E", "F", "F#", "Gb", "G", "G#", "Ab", "A", "A#", "Bb", "B"
]  # fmt: skip
Mode = Literal["major", "minor", "dorian", "mixolydian", "other"]
TimeSignature = Literal["4/4", "3/4", "6/8", "2/4", "5/4", "7/8", "12/8", "other"]
Flag = Literal["profanity", "violence", "sexual", "drugs", "hate", "self-harm"]
MixArea = Literal["vocals", "drums", "bass", "mids", "highs", "stereo", "dynamics", "effects"]
SampleKind = Literal["drums", "melody", "vocal", "bass", "effect"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CatalogMetadata(Section):
    """What a catalogue says of a song."""

    genre: Phrase
    subgenre: Phrase
    bpm: Bpm
    key: Key
    mode: Mode
    time_signature: TimeSignature
    vocals: Literal["male", "female", "mixed", "choir", "none"]
    language: Word
    era: Word
    energy: Percent
    instruments: list[Word] = Field(min_length=1, max_length=8)
    keywords: list[Word] = Field(min_length=1, max_length=8)
    summary: list[Sentence] = Field(min_length=1, max_length=3)


class MoodTags(Section):
    """How a song feels."""

    primary: Word
    tags: list[Word] = Field(min_length=1, max_length=6)
    valence: Percent
    energy: Percent


class ContentAdvisory(Section):
    """What listeners should be warned of."""

    rating: Literal["clean", "explicit", "instrumental"]
    flags: list[Flag] = Field(max_length=6)
    note: Sentence


class MusicTheory(Section):
    """Key, tempo, harmony and form."""

    key: Key
    mode: Mode
    bpm: Bpm
    time_signature: TimeSignature
    chords: list[
        Annotated[str, Field(pattern="^[A-G][#b]?(m|7|m7|maj7|dim|aug|sus2|sus4|m7b5|9)?$")]
    ] = Field(min_length=1, max_length=8)
    form: list[Literal["intro", "verse", "chorus", "bridge", "break", "solo", "outro"]] = Field(
        min_length=1, max_length=9
    )
    form_start_seconds: list[Moment] = Field(min_length=1, max_length=9)  # of each of the form
    harmony: Sentence
    rhythm: Sentence


class MixIssue(Section):
    """One thing to change in a mix."""

    area: MixArea
    problem: Sentence
    fix: Sentence


class MixFeedback(Section):
    """What an engineer would say of a mix."""

    overall: Percent
    balance: Sentence
    strengths: list[Sentence] = Field(min_length=1, max_length=3)
    issues: list[MixIssue] = Field(max_length=2)


class SimilarArtist(Section):
    """An artist that sounds alike, and in what."""

    name: Name
    reason: Phrase


class SimilarArtists(Section):
    """Who sounds alike."""

    artists: list[SimilarArtist] = Field(min_length=1, max_length=4)


class SampleGuess(Section):
    """A part of a song that may be a sample."""

    kind: SampleKind
    start_seconds: Moment
    confidence: Percent
    description: Phrase


class SampleDetection(Section):
    """Whether a song seems to use samples, and where."""

    uses_samples: bool
    samples: list[SampleGuess] = Field(max_length=3)
    note: Phrase


class AudienceProfile(Section):
    """Who would listen, and where."""

    age_from: Annotated[int, Field(ge=10, le=80)]
    age_to: Annotated[int, Field(ge=10, le=99)]
    listeners: list[Phrase] = Field(min_length=1, max_length=4)
    occasions: list[Phrase] = Field(min_length=1, max_length=4)
    regions: list[Phrase] = Field(min_length=1, max_length=4)
    fans_of: list[Name] = Field(max_length=3)
    summary: list[Sentence] = Field(min_length=1, max_length=2)


class SyncBriefMatch(Section):
    """Where a song would fit in film, television, games and advertising."""

    media: list[Literal["film", "television", "advertising", "game", "trailer"]] = Field(
        min_length=1, max_length=5
    )
    scenes: list[Sentence] = Field(min_length=1, max_length=3)
    brands: list[Phrase] = Field(max_length=4)
    best_moment_seconds: Moment
    instrumental_needed: bool
    cautions: list[Sentence] = Field(max_length=2)
    fit: Percent


class Advice(Section):
    """What to work on, and how."""

    area: Literal["writing", "performance", "production", "arrangement", "branding", "live"]
    advice: Sentence


class ArtistDevelopmentNotes(Section):
    """What an artist does well and might do next."""

    strengths: list[Sentence] = Field(min_length=1, max_length=3)
    improve: list[Advice] = Field(min_length=1, max_length=3)
    next_steps: list[Sentence] = Field(min_length=1, max_length=3)


SECTIONS: dict[str, type[Section]] = {
    model.__name__: model
    for model in (
        CatalogMetadata,
        MoodTags,
        ContentAdvisory,
        MusicTheory,
        MixFeedback,
        SimilarArtists,
        SampleDetection,
        AudienceProfile,
        SyncBriefMatch,
        ArtistDevelopmentNotes,
    )
}
