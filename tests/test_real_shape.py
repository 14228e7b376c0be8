"""A checkpoint of the real one's layers, under each naming of its weights, loads on both engines.

Narrow layers with values for the loading itself, and the real widths on torch's meta device, where
a tensor has a shape and no storage.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from adapter.checkpoint import load_checkpoint
from adapter.random_model import TINY, Architecture, ModelShape, write_random_model
from adapter.transformers_engine import TransformersEngine

REAL_LAYERS = dataclasses.replace(TINY, encoder_layers=32, num_layers=28)
STRAY = "audio_tower.pos_emb.freqs"
ARCHITECTURES: tuple[Architecture, ...] = (
    "MusicFlamingoForConditionalGeneration",
    "AudioFlamingo3ForConditionalGeneration",
)


def as_module(name: str) -> str:
    """The name of an uploaded weight in transformers' modules."""
    name = name.replace("language_model.lm_head", "lm_head")
    name = name.replace("language_model.model.", "language_model.")
    return name if name.startswith("lm_head") else f"model.{name}"


NAMINGS: dict[str, Callable[[str], str]] = {
    "uploaded": str,
    "model. in front": lambda name: f"model.{name}",
    "transformers' modules": as_module,
    "save_pretrained of 5.19": lambda name: name.replace("model.model.", "model.model.model."),
}


def uploaded_name(saved: str) -> str:
    """The uploads' name of a weight as transformers 5.19 saves it."""
    return saved.replace("language_model.model.model.", "language_model.model.")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrow checkpoint of 32 and 28 layers, as transformers saves it."""
    directory = tmp_path_factory.mktemp("real-layers") / "saved"
    shape = dataclasses.replace(REAL_LAYERS, architecture=request.param)
    write_random_model(directory, shape=shape)
    return directory


@pytest.fixture(scope="module")
def weights(saved: Path) -> dict[str, torch.Tensor]:
    """Its weights, by the uploads' naming."""
    loaded = load_file(saved / "model.safetensors")
    return {uploaded_name(name): weight for name, weight in loaded.items()}


@pytest.fixture(params=NAMINGS)
def named(
    request: pytest.FixtureRequest, saved: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> Path:
    """The checkpoint under one naming, with a stray weight, in two files with an index."""
    directory = Path(shutil.copytree(saved, tmp_path / "named"))
    (directory / "model.safetensors").unlink()
    naming = NAMINGS[request.param]
    renamed = {naming(name): weight.clone() for name, weight in weights.items()}
    assert len(renamed) == len(weights)
    renamed[naming(STRAY)] = torch.ones(3)
    write_shards(directory, renamed)
    return directory


def write_shards(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    names = sorted(weights)
    half = len(names) // 2
    shards = {"model-00001-of-00002.safetensors": names[:half]}
    shards["model-00002-of-00002.safetensors"] = names[half:]
    for file, part in shards.items():
        save_file({name: weights[name] for name in part}, directory / file, {"format": "pt"})
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_the_layers_are_as_many_as_the_real_ones(weights: dict[str, torch.Tensor]) -> None:
    layers = {name.partition(".layers.")[::2] for name in weights if ".layers." in name}
    counts = {(tower, rest.partition(".")[0]) for tower, rest in layers}
    assert sum(tower == "audio_tower" for tower, _ in counts) == 32
    assert sum(tower == "language_model.model" for tower, _ in counts) == 28


def test_every_naming_loads_on_transformers_with_only_the_stray_left_over(
    named: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = log_loading(monkeypatch)
    engine = TransformersEngine.load(load_checkpoint(str(named)), dtype="float32", device="cpu")
    (info,) = loading
    left_over = info.pop("unexpected_keys")
    assert not any(info.values()), info
    assert len(left_over) == 1 and next(iter(left_over)).endswith(STRAY)
    expected = TransformersEngine.load(
        load_checkpoint(str(saved)), dtype="float32", device="cpu"
    )._model.state_dict()
    got = engine._model.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def log_loading(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What transformers says of each load: what was missing, unexpected, of another shape."""
    infos: list[dict[str, Any]] = []

    def log(_: object, info: dict[str, Any]) -> None:
        infos.append({key: set(value) for key, value in info.items()})

    monkeypatch.setattr("adapter.transformers_engine._check_complete", log)
    return infos


# vLLM


def vllm_model(directory: Path, architecture: str, device: str = "cpu") -> Any:
    """vLLM's model of the plugin for a checkpoint's configuration, without its weights."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from adapter import plugin

    plugin.check_registered(architecture)
    args = EngineArgs(model=str(directory), dtype="float32", enforce_eager=True, max_model_len=8192)
    config = args.create_engine_config()
    with set_current_vllm_config(config), torch.device(device):
        model = initialize_model(config)
    assert type(model).__module__ == "adapter.music_flamingo"
    return model


def architecture_of(directory: Path) -> str:
    return str(json.loads((directory / "config.json").read_text())["architectures"][0])


def read_shards(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                yield name, shard.get_tensor(name)


def test_every_naming_loads_on_vllm_with_only_the_stray_left_over(
    named: Path,
    saved: Path,
    parallel_state: None,  # noqa: ARG001
) -> None:
    """A name that the model does not know is an error of vLLM's loader."""
    model = vllm_model(named, architecture_of(named))
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.fill_(torch.nan)
    assert model.load_weights(read_shards(named)) == parameters.keys()
    assert not any(parameter.isnan().any() for parameter in parameters.values())
    expected = vllm_model(saved, architecture_of(saved))
    expected.load_weights(read_shards(saved))
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameters[name], parameter), name


def test_a_weight_that_vllm_does_not_know_does_not_load(
    saved: Path,
    parallel_state: None,  # noqa: ARG001
) -> None:
    model = vllm_model(saved, architecture_of(saved))
    with pytest.raises(ValueError, match="no_such_layer"):
        model.load_weights([("audio_tower.no_such_layer.weight", torch.ones(3))])


# The real widths


REAL = ModelShape(
    encoder_layers=32,
    encoder_hidden_size=1280,
    encoder_heads=20,
    num_layers=28,
    hidden_size=3584,
    num_heads=28,
    num_kv_heads=4,
    intermediate_size=18_944,
)
REAL_VOCABULARY = 151_672
# A parameter of vLLM's that stacks several of the checkpoint's, in this order.
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def real_config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the real configuration, the demo's tokenizer, and no weights."""
    from adapter.random_model import build_config, build_processor, build_tokenizer

    directory = tmp_path_factory.mktemp("real-widths") / "model"
    shape = dataclasses.replace(REAL, architecture=request.param)
    tokenizer = build_tokenizer()
    config = build_config(tokenizer, shape)
    config.text_config.vocab_size = REAL_VOCABULARY
    config.text_config.tie_word_embeddings = False
    config.architectures = [request.param]
    config.save_pretrained(directory)
    build_processor(tokenizer, shape).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def real_weights(real_config: Path) -> dict[str, torch.Tensor]:
    """transformers' weights of the real configuration, by the uploads' naming, without storage."""
    architecture = architecture_of(real_config)
    config = transformers.AutoConfig.from_pretrained(real_config)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    names = {as_upload(name): weight for name, weight in model.state_dict().items()}
    assert len(names) == len(model.state_dict())
    return names


def as_upload(module_name: str) -> str:
    """The inverse of `as_module`."""
    name = module_name.removeprefix("model.")
    name = re.sub(r"^lm_head\b", "language_model.lm_head", name)
    return re.sub(r"^language_model\.(?!lm_head)", "language_model.model.", name)


def test_the_real_configuration_has_the_real_sizes(real_weights: dict[str, torch.Tensor]) -> None:
    assert real_weights["language_model.lm_head.weight"].shape == (REAL_VOCABULARY, 3584)
    assert real_weights["audio_tower.conv1.weight"].shape == (1280, 128, 3)
    assert real_weights["multi_modal_projector.linear_1.weight"].shape == (3584, 1280)
    num_parameters = sum(weight.numel() for weight in real_weights.values())
    assert num_parameters == 8_267_215_360
    assert all(as_upload(as_module(name)) == name for name in real_weights)


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_real_tensor_has_its_place_and_shape_in_the_plugin(
    real_config: Path,
    real_weights: dict[str, torch.Tensor],
    parallel_state: None,  # noqa: ARG001
    naming: str,
) -> None:
    model = vllm_model(real_config, architecture_of(real_config), "meta")
    parameters = dict(model.named_parameters())
    assert all(parameter.is_meta for parameter in parameters.values())
    named = [(NAMINGS[naming](name), weight) for name, weight in real_weights.items()]
    mapped = model.hf_to_vllm_mapper.apply_list([name for name, _ in named])
    assert mapped == list(real_weights)  # vLLM's modules are named as the uploads
    assert place(parameters, real_weights) == {name: p.shape for name, p in parameters.items()}
    assert model.load_weights(named) == parameters.keys()


def place(
    parameters: dict[str, Any], weights: dict[str, torch.Tensor]
) -> dict[str, tuple[int, ...]]:
    """The shape that each parameter must have for the weights that belong into it.

    Every weight belongs into exactly one: by its name, or stacked on the first dimension.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    left = dict(weights)
    for name in parameters:
        stack = next((stack for stack in STACKED if stack in name.split(".")), None)
        parts = [name.replace(stack, part) for part in STACKED[stack]] if stack else [name]
        found = [left.pop(part) for part in parts if part in left]
        shapes[name] = torch.Size((num_rows(name, found), *found[0].shape[1:]))
    assert not left
    return shapes


def num_rows(name: str, stacked: list[torch.Tensor]) -> int:
    """The rows of a stack, with what vLLM adds: zeros for the bias that Whisper's keys lack, and a
    vocabulary of a multiple of 64."""
    rows = sum(weight.shape[0] for weight in stacked)
    if name.startswith("audio_tower") and name.endswith("qkv_proj.bias"):
        assert len(stacked) == 2
        return rows + stacked[0].shape[0]
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return -(-rows // 64) * 64
    return rows


@pytest.mark.parametrize(
    "name",
    [
        "audio_tower.layers.31.self_attn.k_proj.weight",
        "language_model.model.layers.27.self_attn.k_proj.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
        "multi_modal_projector.linear_2.bias",
        "language_model.lm_head.weight",
    ],
)
def test_a_tensor_of_another_shape_is_noticed(
    real_config: Path,
    real_weights: dict[str, torch.Tensor],
    parallel_state: None,  # noqa: ARG001
    name: str,
) -> None:
    model = vllm_model(real_config, architecture_of(real_config), "meta")
    parameters = dict(model.named_parameters())
    rows, *rest = real_weights[name].shape
    wrong = real_weights | {name: torch.empty(rows + 64, *rest, device="meta")}
    assert place(parameters, wrong) != {name: p.shape for name, p in parameters.items()}
    with pytest.raises(AssertionError):
        place(parameters, real_weights | {f"{name}.more": real_weights[name]})
