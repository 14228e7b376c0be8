"""Server-sent events are the same however their bytes are cut."""

import pytest

from adapter import event_stream
from adapter.event_stream import Event, EventStream

STREAM = (
    '\ufeff: a comment\n\nevent: delta\ndata: {"text": "é"}\n\nid: 7\nretry: 10\n'
    "data: one\r\ndata:two\r\rdata\n\nevent: nothing\n\nevent: delta\ndata:  spaced: out\n\n"
    "event: cut\ndata: off\n"
).encode()
EVENTS = [
    Event("delta", '{"text": "é"}'),
    Event("message", "one\ntwo"),
    Event("message", ""),
    Event("delta", " spaced: out"),
]


def events(*chunks: bytes) -> list[Event]:
    stream = EventStream()
    return [event for chunk in chunks for event in stream.feed(chunk)]


def test_an_event_is_its_name_and_its_lines_of_data() -> None:
    assert events(STREAM) == EVENTS


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 7])
def test_the_cuts_between_chunks_do_not_matter(num_bytes: int) -> None:
    starts = range(0, len(STREAM), num_bytes)
    assert events(*(STREAM[start : start + num_bytes] for start in starts)) == EVENTS


def test_an_event_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_EVENT_CHARACTERS", 1000)
    assert len(events(*[b"data: " + b"x" * 900 + b"\n\n"] * 5)) == 5
    with pytest.raises(ValueError, match="more than 1000 characters"):
        events(*[b"data: " + b"x" * 90 + b"\n"] * 20)
    with pytest.raises(ValueError, match="more than 1000 characters"):
        events(*[b"x" * 90] * 20)
