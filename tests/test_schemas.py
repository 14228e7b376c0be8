"""The wire: what a request may hold, how a refusal reads, what an answer holds."""

import json
import math
import subprocess
import sys
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from adapter.errors import UnprocessableError
from adapter.request import Sampling
from adapter.schemas import (
    Answer,
    AnswerError,
    AudioInfo,
    BatchAnswer,
    ErrorBody,
    ErrorResponse,
    Health,
    PromptFields,
    Timings,
    Usage,
    parse,
    request_models,
    show,
)
from adapter.settings import Settings

MODELS = request_models(Settings())


def generate(**fields: object) -> PromptFields:
    return parse(MODELS.generate, fields)


def refusal(obj: object, *, batch: bool = False, uploaded: bool = False) -> UnprocessableError:
    model = MODELS.generate_batch if batch else MODELS.generate
    with pytest.raises(UnprocessableError) as caught:
        parse(model, obj, uploaded=uploaded)
    assert caught.value.status == 422
    assert len(caught.value.message) < 500
    return caught.value


def test_an_empty_request_has_the_contracts_defaults() -> None:
    request = generate()
    assert request.model_dump() == {
        "audio_url": None,
        "audio": None,
        "preset": None,
        "prompt": "Describe this music.",
        "start_seconds": None,
        "end_seconds": None,
        "max_new_tokens": 512,
        "temperature": 1.0,
        "top_p": 1.0,
        "do_sample": False,
        "seed": None,
        "repetition_penalty": 1.0,
        "stop_on_repetition": False,
        "json_schema": None,
        "stream": False,
    }
    assert request.to_sampling() == Sampling()


def test_the_old_clients_request_is_understood() -> None:
    sent = {
        "prompt": "What is the key?",
        "audio_url": "https://example.com/a.mp3?sig=1",
        "max_new_tokens": 64,
        "temperature": 0.7,
        "top_p": 0.9,
        "do_sample": True,
    }
    assert sent.items() <= generate(**sent).model_dump().items()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", "x"),
        ("prompt", "𝄞" * 24_000),
        ("prompt", "\0\u202e<sound><|im_end|>"),
        ("audio_url", None),
        ("audio_url", "HTTP://example.com"),
        ("audio", "data:audio/wav;base64,UklG"),
        ("start_seconds", 0),
        ("end_seconds", 1.5),
        ("max_new_tokens", 1),
        ("max_new_tokens", 2048),
        ("max_new_tokens", 64.0),
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 0),
        ("top_p", 1),
        ("do_sample", True),
        ("seed", None),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("seed", 7.0),
        ("repetition_penalty", 1e-9),
        ("repetition_penalty", 2),
    ],
)
def test_a_value_inside_its_range_is_taken(name: str, value: object) -> None:
    assert getattr(generate(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", ""),
        ("prompt", "x" * 24_001),
        ("prompt", None),
        ("prompt", 5),
        ("audio_url", ""),
        ("audio_url", "ftp://example.com/a.mp3"),
        ("audio_url", "https://" + "a" * 16_384),
        ("audio_url", 1),
        ("audio", ""),
        ("audio", {}),
        ("start_seconds", -0.1),
        ("start_seconds", "1"),
        ("start_seconds", True),
        ("end_seconds", math.inf),
        ("max_new_tokens", 0),
        ("max_new_tokens", 2049),
        ("max_new_tokens", 64.5),
        ("max_new_tokens", "64"),
        ("max_new_tokens", True),
        ("max_new_tokens", None),
        ("max_new_tokens", math.nan),
        ("max_new_tokens", math.inf),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("temperature", False),
        ("top_p", 1.01),
        ("top_p", None),
        ("do_sample", 1),
        ("do_sample", "true"),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("seed", False),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.01),
        ("repetition_penalty", 10**400),
    ],
)
def test_a_value_outside_its_range_or_type_is_refused_by_name(name: str, value: object) -> None:
    error = refusal({name: value})
    assert (error.code, error.field) == ("invalid_value", name)
    assert error.message.startswith(f"{name} is ")
    assert " should " in error.message


def test_a_refusal_names_field_value_and_what_to_send() -> None:
    error = refusal({"prompts": [{}, {}, {}, {"top_p": 1.5}, {}]}, batch=True)
    assert error.field == "prompts.3.top_p"
    assert error.message == "prompts.3.top_p is 1.5; it should be less than or equal to 1."


def test_a_long_value_is_shortened_in_the_refusal() -> None:
    assert len(refusal({"prompt": "x" * 1_000_000}).message) < 200
    assert len(refusal({"x" * 1_000_000: 1}).field or "") < 100


def test_a_refused_url_shows_no_signature_and_no_password() -> None:
    error = refusal({"audio_url": "ftp://user:hunter2@example.com/a?sig=hunter2"})
    assert "hunter2" not in error.message


def test_an_unknown_field_is_refused_with_the_likely_one() -> None:
    error = refusal({"prompts": [{}, {"topp": 0.5}]}, batch=True)
    assert (error.code, error.field) == ("unknown_field", "prompts.1.topp")
    assert error.message.endswith("did you mean top_p?")


def test_a_field_that_is_not_built_is_refused_as_unknown() -> None:
    error = refusal({"top_k": None})
    assert (error.code, error.field) == ("unknown_field", "top_k")


def test_a_prompt_of_a_batch_has_no_stream_of_its_own() -> None:
    error = refusal({"prompts": [{"stream": True}]}, batch=True)
    assert (error.code, error.field) == ("unknown_field", "prompts.0.stream")


def test_a_million_unknown_fields_cost_one_error() -> None:
    refused = refusal({f"field{i}": i for i in range(1_000_000)})
    assert refused.field == "field0"


@pytest.mark.parametrize("source", ["audio_url", "audio"])
def test_several_songs_in_one_prompt_are_pointed_to_a_batch(source: str) -> None:
    error = refusal({source: ["https://a.example.com", "https://b.example.com"]})
    assert error.field == source
    assert "one song a prompt" in error.message
    assert "/generate_batch" in error.message


def test_two_sources_of_one_song_are_refused() -> None:
    both = {"audio_url": "https://example.com/a.mp3", "audio": "UklG"}
    assert refusal(both).field == "audio"
    assert refusal({**both, "prompts": [{}]}, batch=True).field == "audio"
    assert refusal({"prompts": [{}, both]}, batch=True).field == "prompts.1.audio"
    assert generate(audio_url=both["audio_url"], audio=None).audio is None


@pytest.mark.parametrize("source", ["audio_url", "audio"])
def test_an_uploaded_song_excludes_another_source(source: str) -> None:
    song = {source: "https://example.com/a.mp3"}
    assert refusal(song, uploaded=True).field == source
    own = parse(MODELS.generate_batch, {"prompts": [song]}, uploaded=True)
    assert getattr(own.prompts[0], source) == song[source]


@pytest.mark.parametrize(
    ("obj", "code", "field"),
    [
        ({}, "missing_field", "prompts"),
        ({"prompts": []}, "invalid_value", "prompts"),
        ({"prompts": [{}] * 65}, "invalid_value", "prompts"),
        ({"prompts": {}}, "invalid_value", "prompts"),
        ({"prompts": ["Describe"]}, "invalid_value", "prompts.0"),
        ({"prompts": [{}], "group_size": 0}, "invalid_value", "group_size"),
        ({"prompts": [{}], "group_size": 9}, "invalid_value", "group_size"),
        ({"prompts": [{}], "group_size": "1"}, "invalid_value", "group_size"),
        ([], "invalid_value", None),
        ("prompts", "invalid_value", None),
    ],
)
def test_a_malformed_batch_is_refused(obj: object, code: str, field: str | None) -> None:
    error = refusal(obj, batch=True)
    assert (error.code, error.field) == (code, field)


def test_a_body_that_is_no_object_is_told_so() -> None:
    assert refusal([1]).message == "The body is a list of 1; it should be a JSON object."


def test_a_batch_of_the_largest_size_is_taken() -> None:
    batch = parse(MODELS.generate_batch, {"prompts": [{}] * 64, "group_size": 8.0})
    assert (len(batch.prompts), batch.group_size) == (64, 8)
    assert parse(MODELS.generate_batch, {"prompts": [{}]}).group_size is None


@pytest.mark.parametrize(
    ("temperature", "drawn"), [(0, 0.0), (1e-9, 0.01), (0.009, 0.01), (0.01, 0.01), (0.7, 0.7)]
)
def test_a_temperature_above_0_counts_as_at_least_a_hundredth(
    temperature: float, drawn: float
) -> None:
    assert generate(temperature=temperature).to_sampling().temperature == drawn


def test_sampling_carries_every_field_that_was_sent() -> None:
    sent: dict[str, Any] = {
        "max_new_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "do_sample": True,
        "seed": 3,
        "repetition_penalty": 1.1,
    }
    assert generate(**sent).to_sampling() == Sampling(**sent)


def test_the_settings_maxima_hold_and_stand_in_the_schema() -> None:
    models = request_models(Settings(max_new_tokens=4, max_prompts=2, max_group_size=3))
    schema = models.generate_batch.model_json_schema()
    prompt = schema["$defs"]["BatchPrompt"]["properties"]
    assert prompt["max_new_tokens"]["maximum"] == 4
    assert prompt["max_new_tokens"]["default"] == 4
    assert schema["properties"]["prompts"]["maxItems"] == 2
    assert schema["properties"]["group_size"]["anyOf"][0]["maximum"] == 3
    assert parse(models.generate, {}).max_new_tokens == 4
    for obj in ({"prompts": [{"max_new_tokens": 5}]}, {"prompts": [{}], "group_size": 4}):
        with pytest.raises(UnprocessableError):
            parse(models.generate_batch, obj)


@pytest.mark.parametrize("model", [MODELS.generate, MODELS.generate_batch])
def test_the_schemas_examples_are_valid_by_schema_and_by_model(model: type[Any]) -> None:
    schema = model.model_json_schema()
    for example in schema["examples"]:
        jsonschema.validate(example, schema, jsonschema.Draft202012Validator)
        parse(model, example)
    assert any("audio_url" not in example for example in schema["examples"])


def test_the_schema_too_forbids_two_sources() -> None:
    schema = jsonschema.Draft202012Validator(MODELS.generate.model_json_schema())
    assert not schema.is_valid({"audio_url": "https://example.com", "audio": "UklG"})
    assert schema.is_valid({"audio_url": None, "audio": "UklG"})


@pytest.mark.parametrize("model", [MODELS.generate, MODELS.generate_batch])
def test_every_request_field_is_described(model: type[BaseModel]) -> None:
    assert all(field.description for field in model.model_fields.values())


def answer(elapsed_seconds: float = 1.2345678) -> Answer:
    return Answer(
        response="A waltz.",
        elapsed_seconds=elapsed_seconds,
        cost_usd=elapsed_seconds * 0.000583,
        gpu_usd_per_second=0.000583,
        rate_source="fallback",
        finish_reason="stop",
        usage=Usage(
            prompt_tokens=6033, completion_tokens=64, cached_tokens=6016, audio_tokens=6000
        ),
        audio=AudioInfo(
            duration_seconds=300.0, start_seconds=0.0, heard_seconds=300.0, truncated=False
        ),
        model="music-flamingo-2601-hf",
        engine="vllm",
        timings=Timings(audio_seconds=0.1, queue_seconds=0.2, wall_seconds=1.9),
    )


ANSWER_FIELDS = {
    *("response", "reasoning", "data", "error", "elapsed_seconds", "cost_usd"),
    *("gpu_usd_per_second", "rate_source", "finish_reason", "usage", "audio", "model"),
    *("engine", "timings"),
}


def test_an_answer_has_every_field_of_the_contract() -> None:
    failed = answer().model_copy(
        update={"response": "", "error": AnswerError(code="engine_error", message="Send it again.")}
    )
    for sent in (answer(), failed):
        assert json.loads(sent.model_dump_json()).keys() == ANSWER_FIELDS
    assert json.loads(failed.model_dump_json())["error"].keys() == {"code", "message", "field"}


@pytest.mark.parametrize("seconds", [1.2345678901234567, 1e-9, 0.1 + 0.2, 123456.000000001])
def test_floats_go_out_unrounded(seconds: float) -> None:
    sent = json.loads(answer(seconds).model_dump_json())
    assert sent["elapsed_seconds"] == seconds
    assert sent["cost_usd"] == seconds * 0.000583


def test_a_batch_answer_has_the_answers_and_the_totals() -> None:
    shared = answer().model_dump(include=set(BatchAnswer.model_fields))
    batch = BatchAnswer(answers=[answer(), answer()], **shared)
    assert json.loads(batch.model_dump_json()).keys() == {
        *("answers", "elapsed_seconds", "cost_usd", "gpu_usd_per_second", "rate_source"),
        *("model", "engine", "timings"),
    }


def test_an_answers_schema_requires_every_field() -> None:
    schema = Answer.model_json_schema(mode="serialization")
    assert set(schema["required"]) == ANSWER_FIELDS


def test_an_error_has_code_message_and_field() -> None:
    error = ErrorResponse(error=ErrorBody(code="not_found", message="No such path."))
    assert json.loads(error.model_dump_json()) == {
        "error": {"code": "not_found", "message": "No such path.", "field": None}
    }


def test_health_says_its_status_also_before_an_engine_is_there() -> None:
    health = Health(
        status="starting",
        model="demo",
        version="0.1.0",
        gpu_usd_per_second=0.000583,
        rate_source="fallback",
        usage_log="off",
    )
    assert json.loads(health.model_dump_json())["engine"] is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a" * 81, '"' + "a" * 80 + '…"'),
        ("\ud800", '"\\ud800"'),
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ([1, 2], "a list of 2"),
        ({"a": 1}, "an object"),
    ],
)
def test_a_value_is_shown_as_json_short_and_encodable(value: object, shown: str) -> None:
    assert show(value) == shown
    show(value).encode()


def test_the_wire_loads_no_engine() -> None:
    code = (
        "import sys, adapter.schemas, adapter.settings\n"
        "print([m for m in ('torch', 'vllm', 'transformers', 'librosa') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_repetition_penalty_stays_a_number_that_a_float32_can_be_divided_by() -> None:
    assert generate(repetition_penalty=5e-324).to_sampling().repetition_penalty == 1e-30
    assert generate(repetition_penalty=0.5).to_sampling().repetition_penalty == 0.5


def test_a_report_names_its_sections_where_all_are_more_than_a_request_may_have() -> None:
    few = request_models(Settings(max_prompts=3)).full_report
    with pytest.raises(UnprocessableError) as caught:
        parse(few, {"audio": "AAAA"})
    assert (caught.value.code, caught.value.field) == ("missing_field", "sections")
    assert parse(few, {"audio": "AAAA", "sections": ["mood_tags"]}).sections == ["mood_tags"]
    assert parse(MODELS.full_report, {"audio": "AAAA"}).sections is None
