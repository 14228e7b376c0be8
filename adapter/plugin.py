"""The entry point of vLLM's plugins: brings the Music Flamingo family back to vLLM 0.32.

vLLM calls `register` in each of its processes (front end, engine core, workers), sometimes twice,
and only logs a plugin that fails; `check_registered` turns that into an error at start-up.
"""

import importlib

from adapter.errors import EngineError

VLLM_VERSION = "0.32"
ARCHITECTURES = ("MusicFlamingoForConditionalGeneration", "AudioFlamingo3ForConditionalGeneration")


def register() -> None:
    """Name the models to vLLM by strings, so that nothing heavy is imported until one is used.

    vLLM 0.32 has an AudioFlamingo3 of its own; the one registered here also loads weights that
    transformers saved anew and encodes long audio in slices.
    """
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"adapter.music_flamingo:{architecture}")


def check_registered(architecture: str) -> None:
    """Raise EngineError, with what to do, where vLLM here cannot serve `architecture`."""
    import vllm
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # type: ignore[no-untyped-call]
    if architecture not in vllm.ModelRegistry.get_supported_archs():
        raise EngineError(
            f"vLLM {vllm.__version__} does not know {architecture}. The plugin that adds it is for "
            f"vLLM {VLLM_VERSION}: install that version, install this package beside it, and name "
            "music_flamingo in VLLM_PLUGINS where that variable is set"
        )
    if architecture in ARCHITECTURES:
        _check_importable(architecture, vllm.__version__)


def _check_importable(architecture: str, version: str) -> None:
    try:
        getattr(importlib.import_module("adapter.music_flamingo"), architecture)
    except (ImportError, AttributeError) as error:
        raise EngineError(
            f"vLLM {version} cannot load {architecture}: {error}. The plugin is for vLLM "
            f"{VLLM_VERSION}: install that version"
        ) from error
