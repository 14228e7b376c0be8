"""The presets: prompts with their settings and schemas, under names that a request may give."""

import dataclasses
import json
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from adapter.errors import UnprocessableError
from adapter.grammar import to_grammar
from adapter.sections import SECTIONS

MAX_FILE_BYTES = 2**20
MAX_PROMPT_CHARACTERS = 24_000


@dataclass(frozen=True, slots=True)
class Preset:
    """A question with its settings. `report_key` names its answer in a report; a preset without a
    `json_schema` is answered in text."""

    name: str
    label: str
    description: str
    report_key: str
    prompt: str
    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    do_sample: bool = True
    stop_on_repetition: bool = False
    json_schema: Mapping[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """What it brings to a request."""
        return {
            "prompt": self.prompt,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "do_sample": self.do_sample,
            "stop_on_repetition": self.stop_on_repetition,
            "json_schema": self.json_schema,
        }


def built_in_presets() -> tuple[Preset, ...]:
    """The 13 of the report, in its order."""
    return parse_presets(files("adapter").joinpath("presets.toml").read_text(encoding="utf-8"))


def read_presets(path: Path) -> tuple[Preset, ...]:
    """The presets of a file. Raises ValueError, in one line that says what was expected."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"a file of at most {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"a TOML file in UTF-8, but it cannot be read: {error}") from None
    return parse_presets(text)


def parse_presets(text: str) -> tuple[Preset, ...]:
    """The presets of a TOML text. Raises ValueError, in one line that says what was expected."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"TOML, but {error}") from None
    tables = document.get("presets")
    if set(document) != {"presets"} or not isinstance(tables, list) or not tables:
        raise ValueError("tables [[presets]], at least one, and nothing else")
    presets = tuple(_preset(table, f"presets.{index}") for index, table in enumerate(tables))
    for attribute in ("name", "report_key"):
        value, count = Counter(getattr(one, attribute) for one in presets).most_common(1)[0]
        if count > 1:
            raise ValueError(f"each {attribute} once, but {value!r} is there {count} times")
    return presets


def _preset(table: object, path: str) -> Preset:
    if not isinstance(table, dict):
        raise ValueError(f"{path} to be a table")
    known = {field.name: field for field in dataclasses.fields(Preset)}
    for name in table:
        if name not in known:
            raise ValueError(f"{path} without {name!r}; its keys are {', '.join(known)}")
    for name, field in known.items():
        if name not in table and field.default is dataclasses.MISSING:
            raise ValueError(f"{path} to have {name!r}")
    values = {name: _value(name, value, f"{path}.{name}") for name, value in table.items()}
    return Preset(**values)


_NUMBERS = {"max_new_tokens": (1, 10_000_000), "temperature": (0, 2), "top_p": (0, 1)}


def _value(name: str, value: Any, path: str) -> Any:
    if name == "json_schema":
        return _schema(value, path)
    if name in ("do_sample", "stop_on_repetition"):
        if not isinstance(value, bool):
            raise ValueError(f"{path} to be true or false")
        return value
    if name in _NUMBERS:
        return _number(name, value, path)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{path} to be a text that is not empty")
    if len(value) > MAX_PROMPT_CHARACTERS:
        raise ValueError(f"{path} to have at most {MAX_PROMPT_CHARACTERS} characters")
    if name == "report_key" and value == "measured":
        raise ValueError(f"{path} not to be 'measured', which a report has beside its sections")
    return value


def _number(name: str, value: Any, path: str) -> float:
    low, high = _NUMBERS[name]
    kinds = int if name == "max_new_tokens" else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise ValueError(f"{path} to be a number from {low} to {high}")
    return value


def _schema(value: Any, path: str) -> Any:
    """The schema that is meant, known to be one that answers can be held to."""
    if isinstance(value, str) and value in SECTIONS:
        return SECTIONS[value].model_json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            names = ", ".join(SECTIONS)
            raise ValueError(f"{path} to be a table, JSON, or one of {names}") from None
    try:
        to_grammar(value)
    except UnprocessableError as error:
        raise ValueError(f"{path} to be a schema to hold to, but {error.message}") from None
    return value
