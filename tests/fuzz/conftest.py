"""One server for all tests that send it what nobody should."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.settings import fuzz_settings
from tests.fuzz.sockets import song_server
from tests.server import Server, running_server


@pytest.fixture(scope="session")
def song_port() -> Iterator[int]:
    with song_server() as port:
        yield port


@pytest.fixture(scope="session")
def fuzzed(
    random_model: Path, song_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server on the transformers engine; it must be alive and without a fault in the end."""
    log = tmp_path_factory.mktemp("fuzz") / "server.log"
    settings = fuzz_settings("transformers", song_port=song_port)
    with running_server(random_model, log, settings) as server:
        yield server
        assert server.get("/health").status_code == 200
        assert "met a fault" not in log.read_text(errors="replace")
