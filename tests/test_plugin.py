"""The plugin as vLLM sees it: cheap to load, safe to load twice, loud where it does not apply."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from adapter import plugin
from adapter.errors import EngineError

ARCHITECTURE = "MusicFlamingoForConditionalGeneration"


def test_importing_the_plugin_loads_neither_torch_nor_vllm() -> None:
    script = (
        "import sys; import adapter.plugin; "
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    (entry_point,) = entry_points(group="vllm.general_plugins", name="music_flamingo")
    assert entry_point.load() is plugin.register


def test_registering_twice_registers_once_and_imports_no_model() -> None:
    import vllm

    plugin.register()
    first = [vllm.ModelRegistry.models[name] for name in plugin.ARCHITECTURES]
    plugin.register()
    assert [vllm.ModelRegistry.models[name] for name in plugin.ARCHITECTURES] == first
    assert {model.module_name for model in first} == {"adapter.music_flamingo"}


def test_a_registered_architecture_passes_the_check() -> None:
    for architecture in plugin.ARCHITECTURES:
        plugin.check_registered(architecture)


def test_a_plugin_that_did_not_load_is_an_error_that_names_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM itself only logs it, and then says that the model was dropped after 0.24."""
    import vllm

    plugin.check_registered(ARCHITECTURE)
    monkeypatch.delitem(vllm.ModelRegistry.models, ARCHITECTURE)
    with pytest.raises(EngineError, match=rf"{ARCHITECTURE}.*vLLM 0\.32"):
        plugin.check_registered(ARCHITECTURE)


def test_a_vllm_without_the_classes_the_plugin_builds_on_is_an_error_that_names_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "adapter.music_flamingo", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.audioflamingo3", None)
    monkeypatch.delattr("vllm.model_executor.models.audioflamingo3", raising=False)
    with pytest.raises(EngineError, match=r"cannot load.*audioflamingo3.*vLLM 0\.32"):
        plugin.check_registered(ARCHITECTURE)
