"""Server-sent events out of the bytes of a response, cut anywhere.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

import codecs
import io
from collections.abc import Iterator
from dataclasses import dataclass

MAX_EVENT_CHARACTERS = 2**25  # a report has some 2**16


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: str


class EventStream:
    """Turns chunks into events; comments, ids and retry times are left out."""

    def __init__(self) -> None:
        # It holds back what a chunk may have cut: a character, or the \r of a \r\n.
        utf8 = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
        self._line = ""
        self._name = ""
        self._data: list[str] = []
        self._num_characters = 0

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that a chunk completes. Raises ValueError where one is too long."""
        text = self._decoder.decode(chunk)
        self._num_characters += len(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            event = self._read(line)
            if event is not None:
                yield event
        if self._num_characters > MAX_EVENT_CHARACTERS:
            raise ValueError(f"an event has more than {MAX_EVENT_CHARACTERS} characters")

    def _read(self, line: str) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        if field == "data":
            self._data.append(value)
        return None

    def _dispatch(self) -> Event | None:
        event = Event(self._name or "message", "\n".join(self._data)) if self._data else None
        self._name, self._data, self._num_characters = "", [], len(self._line)
        return event
