"""A line of the reports' file: what was asked, and the report or the error that came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """What makes two requests the same: the song's SHA-256, or its URL, and the sections.

    `sections` is sorted; None asks for all that the server has.
    """

    song: str
    sections: tuple[str, ...] | None

    @classmethod
    def of(cls, song: str, sections: Sequence[str] | None) -> "Question":
        return cls(song, None if sections is None else tuple(sorted(set(sections))))


@dataclass(frozen=True, slots=True)
class Summary:
    """What the table shows of a record; `error` is that of the song itself."""

    song: str
    duration_seconds: float | None = None
    genre: str = ""
    bpm: str = ""
    key: str = ""
    num_sections: int = 0
    failed_sections: tuple[str, ...] = ()
    elapsed_seconds: float = 0.0
    cost_usd: float = 0.0
    error: str | None = None


def report_record(
    song: str, sha256: str | None, sections: Sequence[str] | None, answer: Mapping[str, Any]
) -> Record:
    """The line of a song whose report came; `answer` is the body of /full_report."""
    asked = None if sections is None else list(sections)
    head = {"song": song, "sha256": sha256, "asked_sections": asked, "finished_at": _now()}
    return {**head, **answer, **head}


def error_record(song: str, error: Mapping[str, Any]) -> Record:
    """The line of a song that failed: it is asked again by the next run."""
    return {"song": song, "error": dict(error), "finished_at": _now()}


def answered_question(record: Mapping[str, Any]) -> Question | None:
    """The question that a record answers; None for an error. Raises ValueError for another line."""
    song = record.get("song")
    if not isinstance(song, str):
        raise ValueError("it has no song")
    if isinstance(record.get("error"), dict):
        return None
    if not isinstance(record.get("report"), dict):
        raise ValueError("it has neither a report nor an error")
    sha256, sections = record.get("sha256"), record.get("asked_sections")
    if sections is not None and not _is_texts(sections):
        raise ValueError("its asked_sections are no list of names")
    return Question.of(sha256 if isinstance(sha256, str) else song, sections)


def summarize(record: Mapping[str, Any]) -> Summary:
    """What is there of it: a record may be another version's, or edited."""
    error = record.get("error")
    if isinstance(error, dict):
        said = f"{error.get('code')}: {error.get('message')}"
        return Summary(str(record.get("song")), error=said)
    sections = [one for one in _list(record.get("sections")) if isinstance(one, dict)]
    overview = _dict(_dict(record.get("report")).get("overview"))
    return Summary(
        song=str(record.get("song")),
        duration_seconds=_duration_seconds(record, sections),
        genre=_text(overview.get("genre")),
        bpm=_text(overview.get("bpm")),
        key=" ".join(filter(None, (_text(overview.get("key")), _text(overview.get("mode"))))),
        num_sections=len(sections),
        failed_sections=tuple(_text(one.get("report_key")) for one in sections if one.get("error")),
        elapsed_seconds=_number(record.get("elapsed_seconds")) or 0.0,
        cost_usd=_number(record.get("cost_usd")) or 0.0,
    )


def _duration_seconds(record: Mapping[str, Any], sections: Sequence[Record]) -> float | None:
    for section in sections:
        seconds = _number(_dict(section.get("audio")).get("duration_seconds"))
        if seconds is not None:
            return seconds
    return _number(_dict(_dict(record.get("report")).get("measured")).get("duration_seconds"))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return str(value) if isinstance(value, str | int | float) else ""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
