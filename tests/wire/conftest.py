"""The wire's tests run against a real server, on either engine; a vLLM one is started once."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference import Reference
from tests.server import Server, running_server
from tests.songs import real_song

ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test of vLLM's own processes has no variant on transformers, which has none."""
    senseless = [
        item
        for item in items
        if item.get_closest_marker("vllm_only") and "transformers" in item.name
    ]
    config.hook.pytest_deselected(items=senseless)
    items[:] = [item for item in items if item not in senseless]


@pytest.fixture(scope="session", params=ENGINES)
def server(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server on the demo checkpoint in float32; vLLM is what `auto` takes where it starts."""
    log = tmp_path_factory.mktemp("server") / f"{request.param}.log"
    setting = "auto" if request.param == "vllm" else request.param
    with running_server(demo_model, log, {"ADAPTER_ENGINE": setting}) as running:
        yield running


@pytest.fixture(scope="session")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model)


@pytest.fixture(scope="session")
def real_song_base64() -> str:
    return base64.b64encode(real_song().read_bytes()).decode()
