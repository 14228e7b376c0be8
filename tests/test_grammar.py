"""JSON schemas as grammars: whatever is drawn from one is valid JSON for its schema."""

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from adapter.errors import UnprocessableError
from adapter.grammar import MAX_SCHEMA_BYTES, to_grammar
from adapter.grammar_numbers import integer_expression, number_expression
from adapter.grammar_pattern import PatternError, pattern_expression
from tests.grammars import accepts, draw_text

VALIDATOR = jsonschema.Draft202012Validator

TEXT = {"type": "string", "pattern": r'^[^\x00-\x1f"\\]{0,12}$'}
SONG = {
    "type": "object",
    "properties": {
        "title": TEXT,
        "bpm": {"type": "integer", "minimum": 30, "maximum": 300},
        "moods": {"type": "array", "items": {"enum": ["calm", "sad"]}, "maxItems": 3},
        "voice": {"anyOf": [{"$ref": "#/$defs/voice"}, {"type": "null"}]},
    },
    "required": ["title", "voice"],
    "$defs": {"voice": {"type": ["boolean", "string"], "maxLength": 4}},
}


def holds(schema: object, value: object) -> bool:
    """Whether the grammar takes a value, written without white space."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return accepts(to_grammar(schema), text)


def refusal(schema: object) -> UnprocessableError:
    with pytest.raises(UnprocessableError) as caught:
        to_grammar(schema)
    assert caught.value.code == "invalid_schema"
    assert len(caught.value.message) < 400
    return caught.value


class TestDrawnAnswers:
    @given(st.integers(0, 2**32))
    @settings(max_examples=60, deadline=None)
    def test_whatever_is_drawn_is_valid(self, seed: int) -> None:
        text = draw_text(to_grammar(SONG), seed)
        assert text is not None
        VALIDATOR(SONG).validate(json.loads(text))

    @given(st.data(), st.integers(0, 2**32))
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    def test_that_is_so_for_every_schema_that_is_taken(
        self, data: st.DataObject, seed: int
    ) -> None:
        schema = data.draw(schemas)
        text = draw_text(to_grammar(schema), seed)
        assume(text is not None)
        VALIDATOR(schema).validate(json.loads(str(text)))

    @pytest.mark.parametrize(
        "pattern",
        [
            r'^[^\x00-\x1f"\\]{0,80}$',
            r"^a|b$",
            r"[ab]{2}",
            r"^.{1,6}$",
            r"^\w+?\d\s?$",
            r'^["\\\n]{1,4}$',
            r"^(\d{3}-){2}x*?$",
            r"^[a-zé\-]+$",
            r"^[^a-z]{2}\W[\S ]\D$",
            r"^\u00e9\x41\.\/$",
            r"^(?:a|)$",
            r"^$",
            r"",
        ],
    )
    def test_a_drawn_string_matches_its_pattern(self, pattern: str) -> None:
        grammar = to_grammar({"type": "string", "pattern": pattern})
        texts = [text for seed in range(40) if (text := draw_text(grammar, seed)) is not None]
        assert texts
        for text in texts:
            assert re.search(pattern, json.loads(text), re.ASCII), text

    @pytest.mark.parametrize(
        ("low", "high"),
        [(0, 9), (0, 10), (5, 250), (-5, 250), (-120, -7), (100, 100), (95, 1203), (-1, 0)],
    )
    def test_numbers_are_those_between_their_bounds_and_no_others(
        self, low: int, high: int
    ) -> None:
        integers = f"root ::= {integer_expression(low, high)}"
        numbers = f"root ::= {number_expression(low, high)}"
        for value in {*range(low - 3, low + 30), *range(high - 30, high + 4)}:
            inside = low <= value <= high
            assert accepts(integers, str(value)) == accepts(numbers, str(value)) == inside, value
            assert accepts(numbers, f"{value}.5") == (low <= float(f"{value}.5") <= high), value
        for seed in range(60):
            assert low <= json.loads(str(draw_text(numbers, seed))) <= high
        assert not accepts(integers, f"0{high}")


LEAVES = st.sampled_from(
    [
        TEXT,
        {"type": "string"},
        {"type": "string", "maxLength": 3, "minLength": 1},
        {"type": "integer", "minimum": -3, "exclusiveMaximum": 140},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number"},
        {"type": ["integer", "null"]},
        {"type": "boolean", "description": "ignored"},
        {"enum": ["a", 1, None, {"x": [1.5, 'é"\n']}]},
        {"const": "\\", "type": "string"},
    ]
)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names[::2]}


schemas = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.text('ab"\\é\n ', max_size=3), inner, max_size=4).map(_object),
        st.builds(
            lambda items, low, more: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 3),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
    ),
    max_leaves=6,
)


class TestWhatFits:
    @pytest.mark.parametrize(
        "value",
        [
            {"title": "So What", "bpm": 136, "moods": ["calm"], "voice": False},
            {"title": "", "voice": None},
            {"title": "é𝄞", "moods": [], "voice": "alto"},
        ],
    )
    def test_a_valid_answer_may_come(self, value: object) -> None:
        assert holds(SONG, value)

    @pytest.mark.parametrize(
        "value",
        [
            {"title": "So What"},
            {"voice": None, "title": ""},
            {"title": "x", "voice": None, "more": 1},
            {"title": "thirteen char", "voice": None},
            {"title": "x", "bpm": 29, "voice": None},
            {"title": "x", "voice": "tenor"},
            {"title": "x", "moods": ["calm"] * 4, "voice": None},
            {"title": "x", "moods": ["glad"], "voice": None},
        ],
    )
    def test_an_invalid_one_may_not(self, value: object) -> None:
        assert not holds(SONG, value)

    def test_escapes_count_as_the_characters_they_are(self) -> None:
        assert holds({"type": "string", "maxLength": 3}, '"\\\n')
        assert not holds({"type": "string", "maxLength": 3}, '"\\\n\t')

    def test_no_raw_control_character_and_no_half_character_comes(self) -> None:
        grammar = to_grammar({"type": "string"})
        assert not accepts(grammar, '"\t"')
        assert not accepts(grammar, '"\\ud800"')

    @pytest.mark.parametrize(
        "half",
        [b"\xed\xa0\x80", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xf4\x90\x80\x80", b"\xc0\x80"],
    )
    @pytest.mark.parametrize("pattern", ["^.$", "^[^a]$", r"^\W$", r'^[^\x00-\x1f"\\]$', r"^\S$"])
    def test_what_is_no_utf_8_comes_in_no_string(self, pattern: str, half: bytes) -> None:
        grammar = to_grammar({"type": "string", "pattern": pattern})
        assert accepts(grammar, '"é"')
        assert not accepts(grammar, b'"' + half + b'"')

    def test_no_white_space_stands_between_values(self) -> None:
        assert not accepts(to_grammar(SONG), '{"title": "x","voice":null}')

    def test_a_tree_is_no_circle(self) -> None:
        tree = {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
        assert holds(tree, [[], [[], []]])


class TestRefusals:
    @pytest.mark.parametrize(
        ("schema", "field", "advice"),
        [
            ([], "", "JSON object"),
            ({}, ".type", "write a type"),
            ({"type": "text"}, ".type", "the types are object"),
            ({"type": "object"}, ".properties", "declare each property"),
            ({"type": "object", "properties": {"a": True}}, ".properties.a", "object with a type"),
            ({"type": "object", "properties": {}, "required": ["z"]}, ".required", "'z'"),
            ({"type": "object", "properties": {}, "patternProperties": {}}, "", "array of objects"),
            ({"type": "object", "properties": {}, "additionalProperties": {}}, "", "declare each"),
            (
                {"type": "object", "properties": {}, "minProperties": 1},
                ".minProperties",
                "required",
            ),
            ({"type": "array"}, ".items", "what the array holds"),
            ({"type": "array", "items": TEXT, "uniqueItems": True}, ".uniqueItems", "leave it out"),
            ({"type": "array", "items": TEXT, "minItems": 3, "maxItems": 2}, ".minItems", "larger"),
            ({"type": "string", "format": "date"}, ".format", "write a pattern"),
            ({"type": "string", "pattern": "^a$", "maxLength": 2}, ".pattern", "{1,80}"),
            ({"type": "string", "pattern": "^(?=a)a$"}, ".pattern", "look-around"),
            ({"type": "string", "pattern": r"^(a)\1$"}, ".pattern", "not known"),
            ({"type": "string", "pattern": r"^\p{L}$"}, ".pattern", "not known"),
            ({"type": "string", "pattern": "^[a$"}, ".pattern", "lacks the ']'"),
            ({"type": "string", "pattern": "^a{9999}$"}, ".pattern", "4096"),
            ({"type": "string", "pattern": "a^b"}, ".pattern", "anchors"),
            ({"type": "string", "pattern": "^\\x00$"}, ".pattern", "control character"),
            ({"type": "string", "pattern": "(" * 5000}, ".pattern", "too deep"),
            ({"type": "integer", "multipleOf": 3}, ".multipleOf", "write an enum"),
            ({"type": "integer", "minimum": 4, "maximum": 3}, "", "no number"),
            ({"type": "number", "minimum": 0.5}, ".minimum", "whole number"),
            ({"type": "number", "exclusiveMinimum": 0}, ".exclusiveMinimum", "write minimum"),
            ({"oneOf": [TEXT]}, ".type", "write anyOf"),
            ({"allOf": [TEXT]}, ".type", "one schema"),
            ({"anyOf": []}, ".anyOf", "empty"),
            ({"anyOf": [TEXT], "type": "string"}, ".type", "beside anyOf"),
            ({"enum": ["a", 1], "type": "string"}, ".enum", "no type"),
            ({"$ref": "#/$defs/gone"}, ".$ref", "not there"),
            ({"$ref": "https://example.com/schema"}, ".$ref", "#/$defs/NAME"),
            ({"$ref": "#"}, "", "refers to itself"),
            ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#"}}}, "", "itself"),
            ({"type": "string", "description": "x" * MAX_SCHEMA_BYTES}, "", "smaller"),
        ],
    )
    def test_what_is_not_held_to_is_refused_by_its_name(
        self, schema: Any, field: str, advice: str
    ) -> None:
        error = refusal(schema)
        assert str(error.field).startswith("json_schema" + field)
        assert advice.strip("'") in error.message

    def test_the_refusal_says_where(self) -> None:
        song = {"type": "object", "properties": {"key": {"type": "string", "format": "date"}}}
        assert refusal(song).field == "json_schema.properties.key.format"

    @given(st.text("ab^$\\[](){}?*+|.-,01dwxu", max_size=12))
    @settings(max_examples=500)
    def test_a_pattern_is_read_or_refused_but_never_a_fault(self, pattern: str) -> None:
        try:
            pattern_expression(pattern)
        except PatternError as error:
            assert str(error)


class TestReasoning:
    @pytest.mark.parametrize(
        "thought", ["", "It is <b>slow</b> </thin < </ </think", "<<</<think><</t", "é\n"]
    )
    def test_the_schema_holds_behind_an_opened_thought(self, thought: str) -> None:
        grammar = to_grammar({"const": 1}, reasoning="opened")
        assert accepts(grammar, f"{thought}</think>\n1")
        assert not accepts(grammar, f"{thought}</think>\n2")
        assert not accepts(grammar, thought + "1")

    def test_a_thought_may_be_left_out_where_it_is_optional(self) -> None:
        grammar = to_grammar({"const": 1}, reasoning="optional")
        assert accepts(grammar, "1")
        assert accepts(grammar, "<think>a</think>1")
        assert not accepts(grammar, "a</think>1")
