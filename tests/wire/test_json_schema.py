"""json_schema: the answer is JSON for it, or honestly none; the same on both engines."""

import json
from typing import Any

import jsonschema
import pytest

from tests.server import Server
from tests.wire.audio import as_base64, song

SHORT = {"type": "string", "pattern": r'^[^\x00-\x1f"\\]{0,12}$'}
CARD = {
    "type": "object",
    "properties": {
        "title": SHORT,
        "bpm": {"type": "integer", "minimum": 30, "maximum": 300},
        "moods": {"type": "array", "items": {"enum": ["calm", "sad"]}, "maxItems": 3},
    },
    "required": ["title", "bpm", "moods"],
    "additionalProperties": False,
}
CHOICE = {"enum": ["major", "minor"]}


def answers(server: Server, *prompts: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"audio": as_base64(song(2)), "prompts": list(prompts)}
    answered = server.post("/generate_batch", body)
    assert answered.status_code == 200, answered.text
    return list(answered.json()["answers"])


def test_the_answer_is_json_for_the_schema(server: Server) -> None:
    """Greedy and drawn, beside prompts with another schema and with none."""
    drawn = [
        {"json_schema": CARD, "do_sample": True, "temperature": 1.5, "seed": seed}
        for seed in range(4)
    ]
    batch = answers(
        server,
        {"json_schema": CARD, "max_new_tokens": 128},
        {"json_schema": CHOICE, "max_new_tokens": 64},
        {"max_new_tokens": 64},
        {"json_schema": CARD, "repetition_penalty": 1.2, "stop_on_repetition": True},
        *drawn,
    )
    for answer in (*batch[:2], *batch[3:]):
        assert answer["error"] is None
        assert answer["finish_reason"] == "stop"
        assert json.loads(answer["response"]) == answer["data"]
    for answer in (batch[0], *batch[3:]):
        jsonschema.validate(answer["data"], CARD)
    assert batch[1]["data"] in ("major", "minor")
    assert batch[2]["data"] is None


def test_the_least_repetition_penalty_breaks_no_form(server: Server) -> None:
    """As a float32 it would be 0, what is divided by it no number, and the grammar's mask void."""
    (answer,) = answers(server, {"json_schema": CHOICE, "repetition_penalty": 5e-324})
    assert answer["error"] is None
    assert answer["data"] in ("major", "minor")


def test_a_cap_before_the_end_is_told_and_billed(server: Server) -> None:
    answer = server.post("/generate", {"json_schema": CARD, "max_new_tokens": 5}).json()
    assert answer["finish_reason"] == "length"
    assert answer["data"] is None
    assert answer["error"]["code"] == "incomplete_json"
    assert answer["response"].startswith('{"')
    assert answer["elapsed_seconds"] > 0


@pytest.mark.parametrize(
    ("schema", "field", "says"),
    [
        ({"type": "string", "format": "date"}, "json_schema.format", "write a pattern"),
        (
            {"type": "string", "pattern": "^((((a{0,99}b){0,99}c){0,99}d){0,99}e){0,99}$"},
            "json_schema",
            "send a simpler one",
        ),
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused(
    server: Server, schema: Any, field: str, says: str
) -> None:
    refused = server.post("/generate_batch", {"prompts": [{}, {"json_schema": schema}]})
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert (error["code"], error["field"]) == ("invalid_schema", f"prompts.1.{field}")
    assert says in error["message"]
