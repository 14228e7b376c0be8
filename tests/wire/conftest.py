"""The wire's tests run against the shared server, on either engine."""

import base64
from pathlib import Path

import pytest

from tests.reference import Reference
from tests.songs import real_song


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test of vLLM's own processes has no variant on transformers, which has none."""
    senseless = [
        item
        for item in items
        if item.get_closest_marker("vllm_only") and "transformers" in item.name
    ]
    config.hook.pytest_deselected(items=senseless)
    items[:] = [item for item in items if item not in senseless]


@pytest.fixture(scope="session")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model)


@pytest.fixture(scope="session")
def real_song_base64() -> str:
    return base64.b64encode(real_song().read_bytes()).decode()
