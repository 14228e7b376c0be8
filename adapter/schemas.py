"""The wire: what a request may hold and what an answer holds. Pydantic, at the edge only."""

import base64
import difflib
import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from adapter.errors import UnprocessableError
from adapter.presets import Preset, built_in_presets
from adapter.request import FinishReason, Sampling
from adapter.settings import Settings

MAX_PROMPT_CHARACTERS = 24_000
MAX_URL_CHARACTERS = 8_192
MAX_SEED = 2**63 - 1
MAX_SECTIONS = 1_000
MIN_TEMPERATURE = 0.01  # vLLM raises a lower one to it; both engines shall draw alike
MIN_REPETITION_PENALTY = 1e-30  # a logit is divided by it, and must stay a float32
DEFAULT_MAX_NEW_TOKENS = 512

RateSource = Literal["configured", "fallback"]
EngineName = Literal["vllm", "transformers"]
Status = Literal["ok", "starting", "restarting", "draining", "failed"]

_EXAMPLE_URL = "https://example.com/song.mp3"
EXAMPLE_SONG = base64.b64encode(
    # A fifth of a second of a beep: WAV, 8 bits, mono, 8 kHz, so that the examples run.
    b"RIFF"
    + struct.pack(
        "<I4s4sIHHIIHH4sI", 1636, b"WAVE", b"fmt ", 16, 1, 1, 8000, 8000, 1, 8, b"data", 1600
    )
    + bytes(128 + 90 * (-1) ** (n // 10) for n in range(1600))
).decode()
_EXAMPLE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "key": {"enum": ["C", "D", "E", "F", "G", "A", "B"]},
        "bpm": {"type": "integer", "minimum": 30, "maximum": 300},
    },
    "required": ["key", "bpm"],
}
_ONE_SOURCE: dict[str, Any] = {
    "anyOf": [
        {"properties": {"audio_url": {"type": "null"}}},
        {"properties": {"audio": {"type": "null"}}},
    ]
}


def _whole(value: object) -> object:
    """JSON has one kind of number: 64.0 is the integer 64."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _one_song(value: object) -> object:
    if isinstance(value, list):
        raise PydanticCustomError(
            "one_song",
            "it should be one song a prompt; to ask about several songs send a batch "
            "(POST /generate_batch) in which each prompt brings its own",
        )
    return value


Whole = BeforeValidator(_whole)
Url = Annotated[
    str,
    Field(pattern="^[hH][tT][tT][pP][sS]?://", max_length=MAX_URL_CHARACTERS),
]


class RequestModel(BaseModel):
    """JSON's types are strict; a field that is not declared is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, data: object) -> object:
        # The first one ends the search: pydantic would make an error for each of a million.
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                raise PydanticCustomError("unknown_field", _unknown(name, cls), {"field": name})
        return data


class AudioSource(RequestModel):
    """The song: a URL, the file itself in base64, or none."""

    audio_url: Annotated[Url | None, BeforeValidator(_one_song)] = Field(
        default=None,
        description="http(s) URL of an audio file. At most one of `audio_url` and `audio`.",
        examples=[_EXAMPLE_URL],
    )
    audio: Annotated[Annotated[str, Field(min_length=1)] | None, BeforeValidator(_one_song)] = (
        Field(
            default=None,
            description="An audio file in base64, standard or URL-safe, with or without a `data:` "
            "prefix.",
        )
    )

    @model_validator(mode="after")
    def _refuse_two_sources(self) -> Self:
        if self.audio_url is not None and self.audio is not None:
            raise PydanticCustomError(
                "two_songs", "it comes beside audio_url; send one of the two", {"field": "audio"}
            )
        return self


_STREAM: bool = Field(
    default=False,
    description="true sends the answer as server-sent events: `delta` (`index`, `text`), `answer` "
    "(`index` and the whole answer), `restart` (`index`: its text starts anew), `done` (the "
    "totals), `error`. Closing the stream stops the work.",
    examples=[False],
)


class PromptFields(AudioSource):
    """What one prompt asks, of which part of the song, and how its answer is drawn."""

    preset: str | None = Field(
        default=None,
        description="A name from `GET /presets`: it brings prompt, cap, sampling and schema. A "
        "field that is sent beside it overrides the preset's; a `prompt` may not be.",
    )
    prompt: str = Field(
        default="Describe this music.",
        min_length=1,
        max_length=MAX_PROMPT_CHARACTERS,
        description="The question. It is only ever text: no special token is read from it.",
        examples=["Which instruments play, and when do they enter?"],
    )
    start_seconds: float | None = Field(
        default=None, ge=0, description="Where the heard part of the song starts.", examples=[30.0]
    )
    end_seconds: float | None = Field(
        default=None,
        ge=0,
        description="Where the heard part ends; past the song's end it means the end.",
        examples=[45.5],
    )
    max_new_tokens: Annotated[int, Field(ge=1), Whole] = Field(
        default=DEFAULT_MAX_NEW_TOKENS,
        description="The most tokens that the answer may have.",
    )
    temperature: float = Field(
        default=1.0,
        ge=0,
        le=2,
        description="Counts with `do_sample`. 0 is greedy; above 0 and below 0.01 counts as 0.01.",
        examples=[0.7],
    )
    top_p: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Counts with `do_sample`. 0 is greedy.",
        examples=[0.9],
    )
    do_sample: bool = Field(
        default=False,
        description="false is greedy, whatever `temperature` and `top_p` say.",
        examples=[True],
    )
    seed: Annotated[int, Field(ge=0, le=MAX_SEED), Whole] | None = Field(
        default=None,
        description="The same seed on the same engine draws the same answer.",
        examples=[7],
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        le=2,
        description="Over prompt and answer, as Hugging Face and vLLM both define it.",
        examples=[1.1],
    )
    stop_on_repetition: bool = Field(
        default=False,
        description="Ends an answer in which a pattern of 1 to 32 tokens stands 8 times in a row; "
        "its `finish_reason` is `repetition`.",
        examples=[True],
    )
    json_schema: dict[str, Any] | None = Field(
        default=None,
        description="The answer is JSON that is valid for this schema, parsed in `data`. Held to "
        "are type, enum, const, anyOf, $ref into $defs, properties, required, items, minItems, "
        "maxItems, pattern, minLength, maxLength, minimum, maximum, and for integers "
        "exclusiveMinimum, exclusiveMaximum; another keyword is refused. An answer that was cut "
        "has `data` null and the error `incomplete_json`.",
        examples=[_EXAMPLE_SCHEMA],
    )

    def to_sampling(self) -> Sampling:
        temperature = self.temperature
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0,
            top_p=self.top_p,
            do_sample=self.do_sample,
            seed=self.seed,
            repetition_penalty=max(self.repetition_penalty, MIN_REPETITION_PENALTY),
            stop_on_repetition=self.stop_on_repetition,
        )


class GenerateRequest(PromptFields):
    """One prompt, about one song or none."""

    stream: bool = _STREAM

    model_config = ConfigDict(
        json_schema_extra={
            **_ONE_SOURCE,
            "examples": [
                {"prompt": "What is a hi-hat?"},
                {"prompt": "Describe this music.", "audio": EXAMPLE_SONG},
            ],
        }
    )


class BatchPrompt(PromptFields):
    """One prompt of a batch; with a song of its own it does not hear the batch's."""

    model_config = ConfigDict(
        json_schema_extra={
            **_ONE_SOURCE,
            "examples": [{"prompt": "Which key is it in?"}],
        }
    )


class GenerateBatchRequest(AudioSource):
    """Many prompts, usually about the one song that is given beside them."""

    model_config = ConfigDict(
        json_schema_extra={
            **_ONE_SOURCE,
            "examples": [
                {"prompts": [{"prompt": "What is a hi-hat?"}]},
                {
                    "audio": EXAMPLE_SONG,
                    "prompts": [
                        {"prompt": "Which key is it in?"},
                        {"prompt": "Write a title.", "do_sample": True, "temperature": 0.7},
                    ],
                },
            ],
        }
    )

    prompts: list[BatchPrompt] = Field(
        min_length=1, description="Answered in this order, each with its own settings."
    )
    group_size: Annotated[int, Field(ge=1), Whole] | None = Field(
        default=None,
        description="The most prompts of this batch that decode together; 1 is one at a time. "
        "Without it the engine's own batching decides.",
    )
    stream: bool = _STREAM


class FullReportRequest(AudioSource):
    """The sections of a report about one song."""

    model_config = ConfigDict(
        json_schema_extra={
            **_ONE_SOURCE,
            "examples": [{"audio": EXAMPLE_SONG, "sections": ["mood_tags"], "seed": 7}],
        }
    )

    sections: list[str] | None = Field(
        default=None, description="Names from `GET /presets`; without it all of them."
    )
    group_size: Annotated[int, Field(ge=1), Whole] | None = Field(
        default=None,
        description="The most sections that decode together; 1 is one at a time. Without it the "
        "engine's own batching decides.",
    )
    seed: Annotated[int, Field(ge=0, le=MAX_SEED - MAX_SECTIONS), Whole] | None = Field(
        default=None,
        description="The section at index i of this request is drawn with `seed` + i.",
        examples=[7],
    )
    stream: bool = _STREAM

    @model_validator(mode="after")
    def _refuse_repeated_sections(self) -> Self:
        for name in self.sections or ():
            if (self.sections or []).count(name) > 1:
                message = "it has a section twice; send each once"
                raise PydanticCustomError("repeated", message, {"field": "sections"})
        return self


@dataclass(frozen=True, slots=True)
class RequestModels:
    """The request models with a server's own maxima, which its OpenAPI document shows."""

    generate: type[GenerateRequest]
    generate_batch: type[GenerateBatchRequest]
    full_report: type[FullReportRequest]


def request_models(settings: Settings) -> RequestModels:
    """The models that refuse what is above the settings' maxima."""
    longest = settings.max_new_tokens
    new_tokens = _described(
        PromptFields,
        "max_new_tokens",
        Annotated[int, Field(ge=1, le=longest), Whole],
        default=min(DEFAULT_MAX_NEW_TOKENS, longest),
        examples=[min(64, longest)],
    )
    presets = settings.presets or built_in_presets()
    names = tuple(one.name for one in presets)
    preset = _described(
        PromptFields,
        "preset",
        Literal[names] | None,
        default=None,
        examples=[presets[0].name],
    )
    asked: dict[str, Any] = {"max_new_tokens": new_tokens, "preset": preset}
    fill = _presets_filler(presets, longest)
    prompt = _subclass(BatchPrompt, fill, **asked)
    prompts = _described(
        GenerateBatchRequest,
        "prompts",
        list[prompt],  # type: ignore[valid-type]
        min_length=1,
        max_length=settings.max_prompts,
    )
    group_size = _described(
        GenerateBatchRequest,
        "group_size",
        Annotated[int, Field(ge=1, le=settings.max_group_size), Whole] | None,
        default=None,
        examples=[1],
    )
    some: Any = Annotated[
        list[Literal[names]],  # type: ignore[valid-type]
        Field(
            min_length=1, max_length=settings.max_prompts, json_schema_extra={"uniqueItems": True}
        ),
    ]
    # All sections are no default where they are more than a request may ask for.
    optional: dict[str, Any] = {"default": None} if len(names) <= settings.max_prompts else {}
    sections = _described(
        FullReportRequest,
        "sections",
        some | None if optional else some,
        **optional,
        examples=[[names[0]]],
    )
    most_sections = _described(
        FullReportRequest, "group_size", group_size[0], default=None, examples=[1]
    )
    return RequestModels(
        generate=_subclass(GenerateRequest, fill, **asked),
        generate_batch=_subclass(GenerateBatchRequest, prompts=prompts, group_size=group_size),
        full_report=_subclass(FullReportRequest, sections=sections, group_size=most_sections),
    )


def _described(model: type[BaseModel], name: str, annotation: Any, **field: Any) -> tuple[Any, Any]:
    return annotation, Field(description=model.model_fields[name].description, **field)


Model = TypeVar("Model", bound=RequestModel)


def _subclass(model: type[Model], fill: Any = None, **fields: Any) -> type[Model]:
    validators: dict[str, Any] = (
        {"fill_in_preset": model_validator(mode="before")(fill)} if fill else {}
    )
    return create_model(
        model.__name__,
        __base__=model,
        __doc__=model.__doc__,
        __validators__=validators,
        **fields,
    )


def _presets_filler(presets: Sequence[Preset], longest: int) -> Callable[[object], object]:
    """What puts a preset's fields where a prompt that names it has none of its own."""
    known = {one.name: one for one in presets}

    def fill(data: object) -> object:
        name = data.get("preset") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(name, str):
            return data
        if name not in known:
            close = difflib.get_close_matches(name[:80], known, n=1)
            hint = f"did you mean {close[0]}?" if close else "GET /presets lists them"
            message = f"there is no such preset; {hint}"
            raise PydanticCustomError("no_preset", message.replace("{", "{{"), {"field": "preset"})
        if "prompt" in data:
            message = "it comes beside a preset, which brings its own; send one of the two"
            raise PydanticCustomError("two_prompts", message, {"field": "prompt"})
        fields = known[name].fields()
        fields["max_new_tokens"] = min(fields["max_new_tokens"], longest)
        return fields | data

    return fill


def parse(model: type[Model], obj: object, *, uploaded: bool = False) -> Model:
    """The request that `obj` (parsed JSON) holds; `uploaded`: its song came as part `audio`.

    Raises UnprocessableError, which names the first field at fault, its value and what to send.
    """
    try:
        request = model.model_validate(obj)
    except ValidationError as error:
        raise _unprocessable(error) from None
    if uploaded and isinstance(request, AudioSource):
        _refuse_second_song(request)
    return request


def _refuse_second_song(request: AudioSource) -> None:
    for name in ("audio_url", "audio"):
        if getattr(request, name) is not None:
            message = f"{name} comes beside an uploaded part 'audio'; send one of the two."
            raise UnprocessableError(message, code="invalid_value", field=name)


_CODES = {"missing": "missing_field", "unknown_field": "unknown_field"}
_EXPECTATIONS = {
    "model_type": "it should be a JSON object",
    "string_pattern_mismatch": "it should be an http:// or https:// URL",
}


def _unprocessable(invalid: ValidationError) -> UnprocessableError:
    error = invalid.errors(include_url=False)[0]
    path: list[str | int] = list(error["loc"])
    value = error["input"]
    if added := error.get("ctx", {}).get("field"):
        path.append(added)
        value = value.get(added) if isinstance(value, Mapping) else value
    field = field_path(path)
    return UnprocessableError(
        _sentence(field or "The body", error["type"], error["msg"], value),
        code=_CODES.get(error["type"], "invalid_value"),
        field=field or None,
    )


def _sentence(subject: str, kind: str, message: str, value: object) -> str:
    if kind == "missing":
        return f"{subject} is missing; it has no default, so send it."
    expected = re.sub("^(Input|List|String) should", "it should", message)
    expected = _EXPECTATIONS.get(kind, expected).replace(" after validation", "").rstrip(".")
    # A URL may hold a signature or a password: its start says enough.
    shown = show(value, 8) if subject.endswith("audio_url") else show(value)
    return f"{subject} is {shown}; {expected}" + ("" if expected.endswith("?") else ".")


def _unknown(name: str, model: type[BaseModel]) -> str:
    known = list(model.model_fields)
    close = difflib.get_close_matches(name[:80], known, n=1, cutoff=0.75)
    if close:
        return f"there is no such field; did you mean {close[0]}?"
    return f"there is no such field; the fields are {', '.join(known)}"


def field_path(parts: Iterable[str | int]) -> str:
    """`prompts.3.top_p`; long names are shortened, lone surrogates escaped."""
    return ".".join(_printable(_shorten(str(part), 80)) for part in parts)


def show(value: object, max_characters: int = 80) -> str:
    """A JSON value as an error names it: short, and always encodable."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str):
        return _printable(json.dumps(_shorten(value, max_characters), ensure_ascii=False))
    return _shorten(json.dumps(value, default=repr), max_characters)


def _shorten(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else text[:max_characters] + "…"


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class AnswerModel(BaseModel):
    """Every field is in every answer; floats go out unrounded."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_serialization_defaults_required=True
    )


class ErrorBody(AnswerModel):
    code: str = Field(examples=["invalid_value"])
    message: str = Field(description="A sentence that says what to do.")
    field: str | None = Field(
        default=None, description="The field at fault.", examples=["prompts.3.top_p"]
    )


class ErrorResponse(AnswerModel):
    """Every error of the API."""

    error: ErrorBody


class AnswerError(ErrorBody):
    """Why a prompt has no answer while others of its batch stand, or its answer is no whole JSON
    (`incomplete_json`)."""


class Usage(AnswerModel):
    """Tokens of the prompt (the song's included) and of the answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = Field(
        default=0, description="The part of `prompt_tokens` that was not computed anew."
    )
    audio_tokens: int = Field(default=0, description="The part of `prompt_tokens` that is song.")


class AudioInfo(AnswerModel):
    """What the prompt heard of its song."""

    duration_seconds: float = Field(description="The whole song.")
    start_seconds: float = Field(description="Where the heard part starts.")
    heard_seconds: float
    truncated: bool = Field(description="true where the checkpoint cannot hear all that was asked.")


class Timings(AnswerModel):
    """Where the time went; none of it but the engine's is billed."""

    audio_seconds: float = Field(
        default=0.0, description="Fetching and decoding; 0 where another prompt did it."
    )
    queue_seconds: float = 0.0
    wall_seconds: float = 0.0


class Billed(AnswerModel):
    """What a request cost and who answered it."""

    elapsed_seconds: float = Field(description="The billed share of the engine's time.")
    cost_usd: float = Field(description="`elapsed_seconds` times `gpu_usd_per_second`, unrounded.")
    gpu_usd_per_second: float
    rate_source: RateSource
    model: str
    engine: EngineName
    timings: Timings


class Said(AnswerModel):
    """What came of one prompt."""

    response: str
    reasoning: str | None = Field(
        default=None, description="What a think checkpoint wrote before its response."
    )
    data: Any = Field(default=None, description="The parsed JSON where a schema was asked for.")
    error: AnswerError | None = None
    finish_reason: FinishReason | None = None
    usage: Usage
    audio: AudioInfo | None = None


class Answer(Billed, Said):
    """The answer to one prompt."""


class Answers(AnswerModel):
    answers: list[Answer] = Field(description="In the order of the prompts.")


class BatchAnswer(Billed, Answers):
    """The answers to a batch; its seconds and dollars are their sums."""


class Section(Answer):
    """A section of a report: the answer to its preset."""

    report_key: str
    preset: str
    disputed_by_measurement: bool = Field(
        default=False, description="true where its tempo or its key is not what was measured."
    )


class FullReport(Billed):
    """A report about a song."""

    report: dict[str, Any] = Field(
        description='Under each report key the section\'s data, its text, or `{"error": …}`; under '
        "`measured` what was measured of the song."
    )
    sections: list[Section] = Field(description="In the order that was asked for.")


class PresetInfo(AnswerModel):
    """A preset as a client sees it."""

    name: str
    label: str
    description: str
    report_key: str = Field(description="Under which a report has its answer.")
    prompt: str
    max_new_tokens: int
    temperature: float
    top_p: float
    do_sample: bool
    json_schema: dict[str, Any] | None = Field(
        description="Of its `data`; null where it is answered in text."
    )


class Presets(AnswerModel):
    """The presets, in the order of the report."""

    presets: list[PresetInfo]


class Live(AnswerModel):
    """Whether the process can still recover."""

    status: Literal["ok", "failed"]


class Health(AnswerModel):
    """Whether answers can be made, by which engine, and why that one."""

    status: Status
    model: str
    engine: EngineName | None = None
    engine_reason: str | None = None
    version: str
    gpu_usd_per_second: float
    rate_source: RateSource
    usage_log: Literal["ok", "failing", "off"] = Field(
        description="failing: answers go on, but their records wait for the disk."
    )
