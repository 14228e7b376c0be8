"""The choice of engine, and what reaches vLLM. No engine of vLLM's is started here."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapter.checkpoint import Checkpoint, load_checkpoint
from adapter.engine import VllmEngine, engine_args, start_engine
from adapter.errors import EngineError, SettingsError
from adapter.settings import load_settings


@pytest.fixture(scope="module")
def checkpoint(random_model: Path) -> Checkpoint:
    return load_checkpoint(str(random_model))


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which vLLM is not installed."""
    find_spec = importlib.util.find_spec

    def find(name: str) -> Any:
        return None if name == "vllm" else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.usefixtures("no_vllm")
async def test_auto_takes_transformers_where_vllm_is_missing_and_says_why(
    checkpoint: Checkpoint,
) -> None:
    engine, reason = start_engine(load_settings({"ADAPTER_ENGINE": "auto"}), checkpoint)
    assert engine.name == "transformers"
    assert reason.startswith("auto: vLLM does not start here (vLLM is not installed here")
    await engine.shutdown()


async def test_auto_takes_transformers_where_vllm_fails_to_start(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Failed to infer device type\nand more")

    monkeypatch.setattr(VllmEngine, "start", fail)
    engine, reason = start_engine(load_settings({"ADAPTER_ENGINE": "auto"}), checkpoint)
    assert engine.name == "transformers"
    assert reason == "auto: vLLM does not start here (Failed to infer device type)"
    await engine.shutdown()


@pytest.mark.usefixtures("no_vllm")
def test_a_forced_vllm_that_is_missing_stops_the_start(checkpoint: Checkpoint) -> None:
    with pytest.raises(EngineError, match="install the extra 'gpu'"):
        start_engine(load_settings({"ADAPTER_ENGINE": "vllm"}), checkpoint)


def test_auto_does_not_hide_a_wrong_setting(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise SettingsError("ADAPTER_ENGINE_ARGS: no such option")

    monkeypatch.setattr(VllmEngine, "start", fail)
    with pytest.raises(SettingsError):
        start_engine(load_settings({"ADAPTER_ENGINE": "auto"}), checkpoint)


def test_every_option_of_vllm_can_be_reached(checkpoint: Checkpoint) -> None:
    given = '{"gpu_memory_utilization": 0.8, "quantization": "fp8", "tensor_parallel_size": 2}'
    args = engine_args(load_settings({"ADAPTER_ENGINE_ARGS": given}), checkpoint)
    assert args["gpu_memory_utilization"] == 0.8
    assert args["quantization"] == "fp8"
    assert args["tensor_parallel_size"] == 2


def test_an_option_that_vllm_does_not_have_is_named_with_the_nearest(
    checkpoint: Checkpoint,
) -> None:
    settings = load_settings({"ADAPTER_ENGINE_ARGS": '{"tensor_paralel_size": 2}'})
    with pytest.raises(SettingsError, match="did you mean 'tensor_parallel_size'"):
        engine_args(settings, checkpoint)


def test_the_adapters_own_arguments_reach_vllm(checkpoint: Checkpoint) -> None:
    variables = {"ADAPTER_MAX_NUM_SEQS": "7", "ADAPTER_DTYPE": "float32"}
    args = engine_args(load_settings(variables), checkpoint)
    assert args["model"] == checkpoint.path
    assert args["max_num_seqs"] == 7
    assert args["dtype"] == "float32"
    assert args["max_model_len"] == checkpoint.context_tokens
    assert args["enable_prefix_caching"] is True
    assert args["generation_config"] == "vllm"


def test_the_sockets_of_vllm_have_a_folder_that_goes_with_the_process() -> None:
    script = (
        "import os, adapter.engine as engine\n"
        "engine.give_sockets_a_folder(); engine.give_sockets_a_folder()\n"
        "folder = os.environ['VLLM_RPC_BASE_PATH']\n"
        "open(os.path.join(folder, 'socket'), 'w').close(); print(folder)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_RPC_BASE_PATH"}
    command = [sys.executable, "-c", script]
    folder = subprocess.check_output(command, env=environment, text=True).strip()
    assert Path(folder).name.startswith("music-flamingo-")
    assert not Path(folder).exists()
