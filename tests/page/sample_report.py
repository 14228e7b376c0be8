"""A report as a good model might write it, in the forms of the built-in presets."""

from typing import Any

DESCRIPTION = (
    "A bright, unhurried instrumental in the spirit of late-nineties game music. A plucked synth "
    "lead carries the tune over a round electric bass and brushed drums, while soft pads widen the "
    "second half. It opens almost bare, gains a counter-melody after the first minute, thins out "
    "for a short break, and returns with everything at once before it fades."
)
LYRICS = "[instrumental]"
PITCH = (
    "A warm, melodic instrumental that sits between lo-fi study beats and classic game scores. It "
    "keeps a steady mid-tempo pulse, has no voice in the way, and ends as calmly as it begins."
)

ANSWERS: dict[str, Any] = {
    "overview": {
        "genre": "Electronic",
        "subgenre": "Game soundtrack",
        "bpm": 112,
        "key": "A",
        "mode": "minor",
        "time_signature": "4/4",
        "vocals": "none",
        "language": "none",
        "era": "late 1990s",
        "energy": 58,
        "instruments": ["synth lead", "electric bass", "drums", "pads"],
        "keywords": ["instrumental", "playful", "melodic", "retro"],
        "summary": [
            "A melodic instrumental with a plucked lead over a steady groove.",
            "It builds in layers and ends in a long fade.",
        ],
    },
    "mood": {
        "primary": "playful",
        "tags": ["light", "curious", "warm", "nostalgic"],
        "valence": 71,
        "energy": 56,
    },
    "description": DESCRIPTION,
    "lyrics": LYRICS,
    "content_advisory": {"rating": "instrumental", "flags": [], "note": "Nothing is sung."},
    "music_theory": {
        "key": "A",
        "mode": "minor",
        "bpm": 112,
        "time_signature": "4/4",
        "chords": ["Am", "F", "C", "G"],
        "form": ["intro", "verse", "chorus", "break", "chorus", "outro"],
        "form_start_seconds": [0, 13, 40, 67, 80, 107],
        "harmony": "A four-chord loop that leans on the relative major.",
        "rhythm": "Straight eighths with a light push on the off-beats.",
    },
    "mix_feedback": {
        "overall": 74,
        "balance": "The lead is clear; the low end is a little polite.",
        "strengths": ["Wide pads that leave the centre free", "A clean, dry drum sound"],
        "issues": [
            {
                "area": "bass",
                "problem": "The bass loses weight on small speakers.",
                "fix": "Add gentle saturation around 200 Hz.",
            }
        ],
    },
    "similar_artists": {
        "artists": [
            {"name": "Yasunori Mitsuda", "reason": "melodic game scores"},
            {"name": "Röyksopp", "reason": "warm, round synths"},
        ]
    },
    "sample_detection": {
        "uses_samples": True,
        "samples": [
            {
                "kind": "drums",
                "start_seconds": 14,
                "confidence": 62,
                "description": "a looped brush pattern",
            }
        ],
        "note": "The loop returns unchanged",
    },
    "audience": {
        "age_from": 18,
        "age_to": 40,
        "listeners": ["players of indie games", "students"],
        "occasions": ["working", "commuting"],
        "regions": ["Europe", "North America"],
        "fans_of": ["Röyksopp"],
        "summary": ["People who like a tune that does not ask for attention."],
    },
    "sync": {
        "media": ["game", "advertising"],
        "scenes": ["A menu or a map screen", "A product film with a light touch"],
        "brands": ["puzzle games"],
        "best_moment_seconds": 63,
        "instrumental_needed": False,
        "cautions": [],
        "fit": 81,
    },
    "playlist_pitch": PITCH,
    "development": {
        "strengths": ["A tune that stays in the ear"],
        "improve": [{"area": "arrangement", "advice": "Let the break breathe for four more bars."}],
        "next_steps": ["Make a shorter edit for playlists."],
    },
}

MEASURED = {
    "duration_seconds": 321.6,
    "tempo_bpm": 124.8,
    "key": "A",
    "mode": "minor",
    "key_strength": 0.81,
    "loudness_lufs": -14.2,
}
DISPUTED = {"overview", "music_theory"}
