"""What more than one test file stands on."""

from pathlib import Path

import pytest

from adapter.demo_model import write_demo_model

# They load a model or start servers: what `make test-fast` leaves out.
SLOW_FILES = {
    "test_bench.py",
    "test_demo_model.py",
    "test_family.py",
    "test_music_flamingo_model.py",
    "test_real_shape.py",
    "test_server_signals.py",
    "test_serving.py",
    "test_transformers_engine.py",
}
SLOW_FOLDERS = {"parity", "vllm", "wire"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW_FILES or item.path.parent.name in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny demo checkpoint, seed 0; read only."""
    directory = tmp_path_factory.mktemp("models") / "demo-model"
    write_demo_model(directory)
    return directory
