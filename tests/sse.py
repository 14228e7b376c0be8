"""Reading server-sent events, as a client would."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Received:
    name: str
    data: dict[str, Any]


def read_events(lines: Iterable[str]) -> Iterator[Received]:
    """The events of a stream, line by line; comments are skipped."""
    name, data = "", ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            data = value
        elif not line and name:
            yield Received(name, json.loads(data))
            name = ""


@contextmanager
def streamed(url: str, body: dict[str, Any]) -> Iterator[Iterator[Received]]:
    """The events that answer a POST."""
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=300) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield read_events(response.iter_lines())


def texts(events: Iterable[Received]) -> dict[int, str]:
    """What the deltas of each prompt come to."""
    written: dict[int, str] = {}
    for event in events:
        if event.name == "delta":
            index = event.data["index"]
            written[index] = written.get(index, "") + event.data["text"]
        elif event.name == "restart":
            written[event.data["index"]] = ""
    return written
