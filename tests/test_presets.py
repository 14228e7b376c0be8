"""The presets: what they ask, that every valid answer fits its cap, and an operator's own."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from adapter.errors import SettingsError, UnprocessableError
from adapter.grammar import to_grammar
from adapter.presets import built_in_presets, parse_presets
from adapter.schemas import parse, request_models
from adapter.settings import Settings, load_settings
from tests.grammars import draw_text

PRESETS = built_in_presets()
IN_JSON = [preset for preset in PRESETS if preset.json_schema]
MODELS = request_models(Settings())
OWN = """
[[presets]]
name = "tempo"
label = "Tempo"
description = "Beats per minute"
report_key = "tempo"
prompt = "What is the tempo?"
max_new_tokens = 32
temperature = 0.3
json_schema = { type = "integer", minimum = 30, maximum = 300 }
"""


def test_the_presets_are_the_reports_in_its_order() -> None:
    assert [(one.name, one.report_key, one.max_new_tokens, one.temperature) for one in PRESETS] == [
        ("catalog_metadata", "overview", 1024, 0.3),
        ("mood_tags", "mood", 256, 0.3),
        ("song_description", "description", 256, 0.7),
        ("lyric_transcription", "lyrics", 2048, 0.1),
        ("content_advisory", "content_advisory", 256, 0.2),
        ("music_theory", "music_theory", 512, 0.3),
        ("mix_feedback", "mix_feedback", 1024, 0.4),
        ("similar_artists", "similar_artists", 512, 0.5),
        ("sample_detection", "sample_detection", 512, 0.5),
        ("audience_profile", "audience", 1024, 0.5),
        ("sync_brief_match", "sync", 1024, 0.4),
        ("playlist_pitch", "playlist_pitch", 512, 0.6),
        ("artist_development_notes", "development", 1024, 0.5),
    ]
    in_text = [one.name for one in PRESETS if one.json_schema is None]
    assert in_text == ["song_description", "lyric_transcription", "playlist_pitch"]
    assert in_text == [one.name for one in PRESETS if one.stop_on_repetition]
    assert all(one.do_sample for one in PRESETS)


def longest_bytes(schema: dict[str, Any], root: dict[str, Any]) -> int:
    """The bytes of the longest valid answer: no token has less than one."""
    if "$ref" in schema:
        return longest_bytes(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    if "enum" in schema:
        return max(len(json.dumps(value)) for value in schema["enum"])
    if schema["type"] == "object":
        members = schema["properties"].items()
        return 1 + sum(len(name) + 4 + longest_bytes(inner, root) for name, inner in members)
    if schema["type"] == "array":
        return 1 + int(schema["maxItems"]) * (1 + longest_bytes(schema["items"], root))
    if schema["type"] == "string":
        bounds = re.search(r"\{1,(\d+)\}\$$", schema["pattern"])
        if bounds is None:  # a chord
            return 2 + 6
        return 2 + int(bounds[1]) * (2 if r"\u024f" in schema["pattern"] else 1)
    if schema["type"] == "boolean":
        return len("false")
    return max(len(str(schema["minimum"])), len(str(schema["maximum"])))


@pytest.mark.parametrize("preset", IN_JSON, ids=lambda preset: preset.name)
def test_the_longest_valid_answer_fits_its_cap_with_its_end(preset: Any) -> None:
    longest = longest_bytes(preset.json_schema, preset.json_schema)
    print(preset.name, longest, preset.max_new_tokens)
    assert longest + 1 <= preset.max_new_tokens


@pytest.mark.parametrize("preset", IN_JSON, ids=lambda preset: preset.name)
def test_whatever_is_drawn_is_valid_and_no_longer_than_that(preset: Any) -> None:
    grammar = to_grammar(preset.json_schema)
    for seed in range(3):
        text = draw_text(grammar, seed)
        assert text is not None
        jsonschema.validate(json.loads(text), preset.json_schema)
        assert len(text.encode()) <= longest_bytes(preset.json_schema, preset.json_schema)


def test_a_preset_brings_its_fields_and_what_is_sent_wins() -> None:
    prompt = parse(MODELS.generate, {"preset": "mood_tags", "temperature": 0.9, "seed": 3})
    mood = PRESETS[1]
    assert (prompt.prompt, prompt.max_new_tokens) == (mood.prompt, mood.max_new_tokens)
    assert (prompt.temperature, prompt.do_sample, prompt.seed) == (0.9, True, 3)
    assert prompt.json_schema == mood.json_schema
    text = parse(MODELS.generate, {"preset": "mood_tags", "json_schema": None})
    assert text.json_schema is None


def test_a_presets_cap_is_lowered_to_the_servers() -> None:
    models = request_models(Settings(max_new_tokens=100))
    batch = parse(models.generate_batch, {"prompts": [{"preset": "lyric_transcription"}]})
    assert batch.prompts[0].max_new_tokens == 100


@pytest.mark.parametrize(
    ("sent", "field", "says"),
    [
        ({"preset": "mood_tag"}, "preset", "did you mean mood_tags?"),
        ({"preset": "xyz"}, "preset", "GET /presets"),
        ({"preset": 5}, "preset", "mood_tags"),
        ({"preset": "mood_tags", "prompt": "Hm?"}, "prompt", "one of the two"),
    ],
)
def test_a_preset_that_cannot_be_had_is_refused(sent: Any, field: str, says: str) -> None:
    with pytest.raises(UnprocessableError) as caught:
        parse(MODELS.generate, sent)
    assert caught.value.field == field
    assert says in caught.value.message


def test_an_operators_presets_replace_the_built_in_ones(tmp_path: Path) -> None:
    path = tmp_path / "presets.toml"
    path.write_text(OWN)
    settings = load_settings({"ADAPTER_PRESETS": str(path)})
    models = request_models(settings)
    assert parse(models.generate, {"preset": "tempo"}).max_new_tokens == 32
    with pytest.raises(UnprocessableError):
        parse(models.generate, {"preset": "mood_tags"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("presets = 1", "tables [[presets]]"),
        ("[[presets", "TOML, but"),
        (OWN + OWN, "each name once"),
        (OWN.replace("label", "lable"), "without 'lable'"),
        (OWN.replace('label = "Tempo"', ""), "presets.0 to have 'label'"),
        (OWN.replace("0.3", "3"), "presets.0.temperature to be a number from 0 to 2"),
        (OWN.replace("integer", "whole"), "json_schema.type"),
        (OWN.replace('report_key = "tempo"', 'report_key = "measured"'), "measured"),
    ],
)
def test_a_file_that_is_wrong_stops_the_start_with_one_line(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_presets(text)
    path = tmp_path / "presets.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"^ADAPTER_PRESETS=.*: expected ") as caught:
        load_settings({"ADAPTER_PRESETS": str(path)})
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_stops_it_too() -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings({"ADAPTER_PRESETS": "/nowhere/presets.toml"})
