"""What is true of a made song, as text: the answers of the presets' sections among them.

What nobody can know of a song that a program made, its section says in the same words always.
"""

from collections.abc import Callable

from pydantic import BaseModel

from adapter.sections import (
    Advice,
    ArtistDevelopmentNotes,
    AudienceProfile,
    CatalogMetadata,
    ContentAdvisory,
    MixFeedback,
    MoodTags,
    MusicTheory,
    SampleDetection,
    SimilarArtist,
    SimilarArtists,
    SyncBriefMatch,
)
from demo_training.songs import SOUNDS, TONICS, MadeSong, Part
from demo_training.sounds import LEADS

MADE = "A program made this song."
ENERGIES = {80: 20, 96: 40, 120: 60, 144: 80}  # percent
VALENCES = {"major": 80, "minor": 20}  # percent
MOODS = {  # of a mode, and whether it is fast
    ("major", False): "calm",
    ("major", True): "happy",
    ("minor", False): "sad",
    ("minor", True): "restless",
}


def instruments(song: MadeSong) -> list[str]:
    """The piano, the bass and the drums where they play, then the leads in the order of LEADS."""
    sounds = [SOUNDS[part.kind] for part in song.sounding]
    rhythm = [("bass", any(s.bass for s in sounds)), ("drums", any(s.drums for s in sounds))]
    led = {part.lead for part in song.sounding}
    leads = [lead for lead in LEADS if lead in led]
    return ["piano", *(name for name, plays in rhythm if plays), *leads]


def parts(song: MadeSong) -> str:
    return ", ".join(f"the {_with_lead(part)}" for part in song.sounding)


def description(song: MadeSong) -> str:
    return f"A song in {song.key} at {song.tempo_bpm} beats per minute: {parts(song)}."


def mood(song: MadeSong) -> str:
    return MOODS[song.key.mode, song.tempo_bpm > 100]


def music_theory(song: MadeSong) -> MusicTheory:
    return MusicTheory(
        key=TONICS[song.key.tonic],  # type: ignore[arg-type]
        mode=song.key.mode,
        bpm=song.tempo_bpm,
        time_signature="4/4",
        chords=list(song.chords),
        form=[part.kind for part in song.sounding],  # type: ignore[misc]
        form_start_seconds=[int(part.start_seconds) for part in song.sounding],
        harmony=f"Four chords in {song.key}.",
        rhythm="Four quarters a bar, a chord on each.",
    )


def catalog_metadata(song: MadeSong) -> CatalogMetadata:
    return CatalogMetadata(
        genre="made by a program",
        subgenre="none",
        bpm=song.tempo_bpm,
        key=TONICS[song.key.tonic],  # type: ignore[arg-type]
        mode=song.key.mode,
        time_signature="4/4",
        vocals="none",
        language="none",
        era="none",
        energy=ENERGIES[song.tempo_bpm],
        instruments=instruments(song),
        keywords=["instrumental", mood(song)],
        summary=[MADE],
    )


def mood_tags(song: MadeSong) -> MoodTags:
    return MoodTags(
        primary=mood(song),
        tags=["instrumental"],
        valence=VALENCES[song.key.mode],
        energy=ENERGIES[song.tempo_bpm],
    )


def content_advisory(_: MadeSong) -> ContentAdvisory:
    return ContentAdvisory(rating="instrumental", flags=[], note="Nobody sings.")


def mix_feedback(_: MadeSong) -> MixFeedback:
    return MixFeedback(overall=50, balance=MADE, strengths=["Nothing is hidden."], issues=[])


def similar_artists(_: MadeSong) -> SimilarArtists:
    return SimilarArtists(artists=[SimilarArtist(name="none", reason="made by a program")])


def sample_detection(_: MadeSong) -> SampleDetection:
    return SampleDetection(uses_samples=False, samples=[], note="made by a program")


def audience_profile(_: MadeSong) -> AudienceProfile:
    return AudienceProfile(
        age_from=10,
        age_to=99,
        listeners=["people who try this server"],
        occasions=["a demo"],
        regions=["none"],
        fans_of=[],
        summary=[MADE],
    )


def sync_brief_match(song: MadeSong) -> SyncBriefMatch:
    return SyncBriefMatch(
        media=["game"],
        scenes=["a demo"],
        brands=[],
        best_moment_seconds=0,
        instrumental_needed=False,
        cautions=[MADE],
        fit=ENERGIES[song.tempo_bpm],
    )


def artist_development_notes(_: MadeSong) -> ArtistDevelopmentNotes:
    return ArtistDevelopmentNotes(
        strengths=["Nothing is hidden."],
        improve=[Advice(area="writing", advice=MADE)],
        next_steps=["none"],
    )


SECTIONS: dict[str, Callable[[MadeSong], BaseModel]] = {
    function.__name__: function
    for function in (
        catalog_metadata,
        mood_tags,
        content_advisory,
        music_theory,
        mix_feedback,
        similar_artists,
        sample_detection,
        audience_profile,
        sync_brief_match,
        artist_development_notes,
    )
}
"""The JSON presets; `model_dump_json` writes them as the grammar does, without white space."""

TEXTS: dict[str, Callable[[MadeSong], str]] = {
    "song_description": description,
    "lyric_transcription": lambda _: "[instrumental]",
    "playlist_pitch": description,
}


def section(preset: str, song: MadeSong) -> str:
    """The answer to a built-in preset."""
    if preset in TEXTS:
        return TEXTS[preset](song)
    return SECTIONS[preset](song).model_dump_json()


def _with_lead(part: Part) -> str:
    return f"{part.kind} with {part.lead}" if part.lead else part.kind
