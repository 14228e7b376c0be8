"""The wire's tests run against the shared server, on either engine."""

import base64
from pathlib import Path

import pytest

from tests.reference import Reference
from tests.songs import real_song


@pytest.fixture(scope="session")
def reference(random_model: Path) -> Reference:
    return Reference(random_model)


@pytest.fixture(scope="session")
def real_song_base64() -> str:
    return base64.b64encode(real_song().read_bytes()).decode()
