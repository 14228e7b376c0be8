"""What fuzzing found once is answered as it should be ever since.

A file is a request, as `make fuzz` writes it; its name begins with the status that is due.
"""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.fuzz.sockets import send_bytes
from tests.fuzz.traffic import RAW, Request, fault, send
from tests.server import Server

CORPUS = sorted(Path(__file__).with_name("corpus").glob("*.json"))


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_a_request_of_the_corpus_is_answered_as_it_should_be(fuzzed: Server, file: Path) -> None:
    request = Request.from_json(file.read_text())
    due = file.name.partition("-")[0]
    if request.method == RAW:
        port = int(fuzzed.url.rsplit(":", 1)[1])
        assert asyncio.run(send_bytes(port, request.content)) == due
        return
    response = asyncio.run(answer(fuzzed, request))
    assert str(response.status_code) == due, response.text
    assert fault(request, response) is None


async def answer(server: Server, request: Request) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        return await send(http, request)
