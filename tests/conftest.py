"""What more than one test file stands on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from adapter.random_model import write_random_model
from tests.server import Server, running_server

# They load a model or start servers: what `make test-fast` leaves out.
SLOW_FILES = {
    "test_bench.py",
    "test_bench_serving.py",
    "test_bombs.py",
    "test_connections.py",
    "test_family.py",
    "test_grammar.py",
    "test_grammar_pool.py",
    "test_measure.py",
    "test_music_flamingo_model.py",
    "test_random_model.py",
    "test_real_shape.py",
    "test_report_command.py",
    "test_report_file.py",
    "test_report_server.py",
    "test_server_signals.py",
    "test_serving.py",
    "test_transformers_engine.py",
}
SLOW_FOLDERS = {"fuzz", "page", "parity", "vllm", "wire"}


ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    drop_senseless(config, items)
    # The shared servers come last: each runs to the end once it is started.
    items.sort(key=wants_shared_server)
    for item in items:
        if item.path.name in SLOW_FILES or item.path.parent.name in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)


def drop_senseless(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the variant on transformers of a test that is for vLLM's processes alone, or for
    vLLM to be quick."""
    senseless = [
        item
        for item in items
        if item.get_closest_marker("vllm_only") and "transformers" in item.name
    ]
    config.hook.pytest_deselected(items=senseless)
    items[:] = [item for item in items if item not in senseless]


def wants_shared_server(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and "server" in callspec.params


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny demo checkpoint, seed 0; read only."""
    directory = tmp_path_factory.mktemp("models") / "demo-model"
    write_random_model(directory)
    return directory


@pytest.fixture(scope="session", params=ENGINES)
def server(
    request: pytest.FixtureRequest, random_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server on the demo checkpoint in float32; vLLM is what `auto` takes where it starts.

    One of each engine for the whole run.
    """
    log = tmp_path_factory.mktemp("server") / f"{request.param}.log"
    setting = "auto" if request.param == "vllm" else request.param
    with running_server(random_model, log, {"ADAPTER_ENGINE": setting}) as running:
        yield running


@pytest.fixture(scope="module")
def parallel_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's modules want their process groups, of one process here."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    rendezvous = f"file://{tmp_path_factory.mktemp('rendezvous') / 'file'}"
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        parallel_state.init_distributed_environment(1, 0, rendezvous, 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
