"""What more than one test file stands on."""

from pathlib import Path

import pytest

from adapter.demo_model import write_demo_model


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny demo checkpoint, seed 0; read only."""
    directory = tmp_path_factory.mktemp("models") / "demo-model"
    write_demo_model(directory)
    return directory
