"""The songs that the demo model learns from, and what is said to be true of them."""

import json
from itertools import pairwise

import jsonschema
import numpy as np
import pytest
from demo_training.lessons import HEADS, IGNORED, find_truths
from demo_training.questions import (
    DRAWN,
    FIXED,
    NEED_A_LOOP,
    PRESETS,
    WORDINGS,
    answer_begin,
    answer_part_at,
    answer_part_lead,
    answer_second,
    draw_question,
)
from demo_training.songs import (
    KINDS,
    SHORTEST_PART_SECONDS,
    TEMPOS,
    UNIT_SECONDS,
    Key,
    MadeSong,
    Part,
    cut_song,
    draw_parts,
    make_song,
)
from demo_training.sounds import LEADS, RATE_HZ, note

from adapter.presets import built_in_presets

SILENT = np.zeros(60 * RATE_HZ, np.float32)
SONG = MadeSong(
    samples=SILENT,
    tempo_bpm=120,
    key=Key(tonic=9, mode="minor"),
    progression=1,
    parts=(
        Part("silence", 0.0, 2.0),
        Part("intro", 2.0, 12.0),
        Part("verse", 12.0, 40.0, "violin"),
        Part("chorus", 40.0, 60.0, "flute"),
    ),
)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def drawn_songs(num_songs: int) -> list[MadeSong]:
    return [make_song(generator(seed), seconds=30, num_parts=3) for seed in range(num_songs)]


def loudness(song: MadeSong, second: float) -> float:
    heard = song.samples[int(second * RATE_HZ) : int((second + 0.2) * RATE_HZ)]
    return float(np.sqrt(np.mean(heard**2)))


def test_the_same_seed_makes_the_same_song() -> None:
    first, again = (make_song(generator(7), 20, 3) for _ in range(2))
    other = make_song(generator(8), 20, 3)

    assert first.samples.tobytes() == again.samples.tobytes()
    assert first.parts == again.parts
    assert first.samples.tobytes() != other.samples.tobytes()


def test_a_song_is_mono_float32_at_16_khz_and_does_not_clip() -> None:
    for song in drawn_songs(5):
        assert song.samples.shape == (30 * 16_000,)
        assert song.samples.dtype == np.float32
        assert 0.3 < np.abs(song.samples).max() < 1.0


def test_the_parts_cover_the_song_without_a_gap() -> None:
    for seed in range(100):
        rng = generator(seed)
        seconds = int(rng.integers(6, 100))
        parts = draw_parts(rng, int(rng.choice(TEMPOS)), seconds, num_parts=5)

        assert parts[0].start_seconds == 0
        assert parts[-1].end_seconds == seconds
        for part, following in pairwise(parts):
            assert part.end_seconds == following.start_seconds


def test_a_part_begins_at_a_whole_second_and_lasts_whole_bars_unless_it_is_the_last() -> None:
    for seed in range(100):
        rng = generator(seed)
        tempo_bpm = int(rng.choice(TEMPOS))
        sounding = [p for p in draw_parts(rng, tempo_bpm, 60, 5) if p.kind != "silence"]

        for part in sounding:
            assert part.start_seconds == int(part.start_seconds)
            assert part.seconds >= SHORTEST_PART_SECONDS
        for part in sounding[:-1]:
            assert part.seconds % UNIT_SECONDS[tempo_bpm] == 0
            assert part.seconds * tempo_bpm % 240 == 0


def test_kinds_come_in_their_order_and_each_part_has_its_own_lead() -> None:
    for seed in range(50):
        parts = [p for p in draw_parts(generator(seed), 96, 80, 5) if p.kind != "silence"]
        leads = [part.lead for part in parts if part.lead]

        assert [p.kind for p in parts] == sorted({p.kind for p in parts}, key=KINDS.index)
        assert len(set(leads)) == len(leads)


def test_silence_is_silent_and_a_part_sounds_from_its_first_second_on() -> None:
    paused = [song for song in drawn_songs(20) if len(song.sounding) < len(song.parts)]
    assert paused

    for song in paused:
        for part in song.parts:
            is_silent = loudness(song, part.start_seconds) < 0.002
            assert is_silent == (part.kind == "silence"), part


def test_a_beat_of_the_tempo_is_struck() -> None:
    song = make_song(generator(3), 12, 1)
    beat = round(60 / song.tempo_bpm * RATE_HZ)
    start = int(song.sounding[0].start_seconds * RATE_HZ)

    for index in range(2, 8):
        struck = start + index * beat
        before, after = song.samples[struck - 800 : struck], song.samples[struck : struck + 800]
        assert np.abs(after).mean() > 1.1 * np.abs(before).mean()


@pytest.mark.parametrize("lead", LEADS)
def test_a_note_has_its_pitch(lead: str) -> None:
    played = note(lead, 69, 1.0)

    spectrum = np.abs(np.fft.rfft(played * np.hanning(len(played))))

    partials = [hertz for hertz in range(50, 2000) if spectrum[hertz] > 0.2 * spectrum.max()]
    assert any(abs(hertz - 440) < 8 for hertz in partials)


def test_a_moment_has_the_songs_sound_and_its_times_begin_at_zero() -> None:
    song = make_song(generator(5), 30, 3)

    moment = cut_song(song, 4.5, 20.0)

    assert np.array_equal(moment.samples, song.samples[int(4.5 * RATE_HZ) : 20 * RATE_HZ])
    assert moment.parts[0].start_seconds == 0
    assert moment.parts[-1].end_seconds == 15.5
    for second in range(15):
        part = moment.part_at(second)
        if part is not None:
            whole = song.part_at(second + 4) or song.part_at(second + 5)
            assert whole is not None
            assert whole.kind == part.kind


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("tempo", "The tempo is 120 beats per minute."),
        ("key", "It is in A minor."),
        ("chords", "The chords are Am, F, Dm, Em."),
        ("lead", "In the verse the violin, in the chorus the flute."),
        ("instruments", "Piano, bass, drums, flute, violin."),
        ("parts", "This is the intro, the verse, the chorus."),
        (
            "description",
            "A song in A minor at 120 beats per minute: the intro, the verse with violin,"
            " the chorus with flute.",
        ),
        ("mood", "The mood is restless."),
        ("singer", "Nobody sings."),
        ("maker", "A program made this song."),
    ],
)
def test_the_truth_about_a_whole_song(kind: str, answer: str) -> None:
    assert FIXED[kind](SONG) == answer


def test_the_truth_about_a_second() -> None:
    assert answer_second(SONG, 1) == "At second 1 there is silence."
    assert answer_second(SONG, 11) == "At second 11 only the piano plays."
    assert answer_second(SONG, 12) == "At second 12 the violin plays."
    assert answer_second(SONG, 59) == "At second 59 the flute plays."
    assert answer_second(SONG, 60) == "The song ends before second 60."
    assert answer_part_at(SONG, 39) == "Second 39 is in the verse."
    assert answer_part_at(SONG, 40) == "Second 40 is in the chorus."


def test_nothing_is_said_of_a_second_that_two_parts_share() -> None:
    moment = cut_song(SONG, 4.5, 60.0)

    assert answer_second(moment, 7) is None
    assert answer_part_at(moment, 7) is None
    assert answer_second(moment, 8) == "At second 8 the violin plays."


def test_the_truth_about_a_part() -> None:
    assert answer_begin(SONG, "chorus") == "The chorus begins at second 40."
    assert answer_begin(SONG, "outro") == "There is no outro."
    assert answer_part_lead(SONG, "verse") == "In the verse the violin plays."
    assert answer_part_lead(SONG, "intro") == "In the intro only the piano plays."
    assert answer_part_lead(SONG, "bridge") == "There is no bridge."


def test_the_truth_of_music_theory() -> None:
    question = draw_question(generator(), SONG, "music_theory")
    assert question is not None

    assert json.loads(question.answer) == {
        "key": "A",
        "mode": "minor",
        "bpm": 120,
        "time_signature": "4/4",
        "chords": ["Am", "F", "Dm", "Em"],
        "form": ["intro", "verse", "chorus"],
        "form_start_seconds": [2, 12, 40],
        "harmony": "Four chords in A minor.",
        "rhythm": "Four quarters a bar, a chord on each.",
    }


@pytest.mark.parametrize("preset", built_in_presets(), ids=lambda preset: preset.name)
def test_the_truth_of_a_preset_has_its_form_and_the_grammars_spelling(preset: object) -> None:
    for song in drawn_songs(20):
        question = draw_question(generator(), song, preset.name)  # type: ignore[attr-defined]
        assert question is not None
        if preset.json_schema is None:  # type: ignore[attr-defined]
            continue
        truth = json.loads(question.answer)
        jsonschema.validate(truth, preset.json_schema)  # type: ignore[attr-defined]
        spelled = json.dumps(truth, separators=(",", ":"), ensure_ascii=False)
        assert question.answer == spelled
        assert list(truth) == list(preset.json_schema["properties"])  # type: ignore[attr-defined]


def test_each_kind_of_question_has_wordings_or_a_preset() -> None:
    assert {*FIXED, *DRAWN} - {"late second"} == set(WORDINGS)
    assert set(PRESETS) == {preset.name for preset in built_in_presets()}


def test_a_moment_of_two_bars_is_not_asked_for_its_key() -> None:
    moment = cut_song(SONG, 13.0, 17.0)

    for kind in NEED_A_LOOP:
        assert draw_question(generator(), moment, kind) is None
        assert draw_question(generator(), SONG, kind) is not None


def test_what_a_second_tells_is_told_for_each_second_but_the_shared_ones() -> None:
    truths = find_truths(cut_song(SONG, 1.5, 60.0))

    assert set(truths) == set(HEADS)
    assert truths["part"].tolist()[:3] == [IGNORED, 1, 1]
    assert truths["part"][9:12].tolist() == [1, IGNORED, 2]
    assert truths["lead"][20] == LEADS.index("violin") + 1
