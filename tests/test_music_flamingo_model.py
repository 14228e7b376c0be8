"""The vLLM model without an engine, against transformers' modules with the same weights."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoProcessor, MusicFlamingoConfig
from transformers.models.musicflamingo import modeling_musicflamingo as reference

from adapter import music_flamingo, plugin
from adapter.random_model import TINY, Architecture, write_random_model
from tests.test_real_shape import NAMINGS

REAL_WIDTH = 1280
WINDOW_FRAMES = 3000  # mel frames in 30 s
EMBEDDINGS = 750  # of a whole window


def rope_config(width: int = REAL_WIDTH) -> MusicFlamingoConfig:
    return MusicFlamingoConfig(
        audio_config={"model_type": "audioflamingo3_encoder", "hidden_size": width}
    )


def reference_rotation(hidden_states: torch.Tensor, first_window: int, width: int) -> torch.Tensor:
    """transformers' own time embedding of consecutive windows of one song."""
    num_windows, num_frames, _ = hidden_states.shape
    windows = torch.arange(first_window, first_window + num_windows)
    seconds = windows.unsqueeze(1) * num_frames * 0.04 + torch.arange(num_frames).float() * 0.04
    cos, sin = reference.MusicFlamingoRotaryEmbedding(rope_config(width))(seconds, num_frames)
    return reference.apply_rotary_time_emb(hidden_states, cos, sin)


@pytest.mark.parametrize("first_window", [0, 8, 32, 56])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_time_embedding_equals_the_reference_bit_by_bit(
    first_window: int, dtype: torch.dtype
) -> None:
    hidden_states = torch.randn(4, EMBEDDINGS, REAL_WIDTH, dtype=dtype)
    time_embedding = music_flamingo.RotaryTimeEmbedding(rope_config())
    turned = time_embedding(hidden_states, first_window)
    assert turned.dtype == dtype
    assert torch.equal(turned, reference_rotation(hidden_states, first_window, REAL_WIDTH))


def test_time_embedding_does_not_follow_the_models_dtype() -> None:
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        time_embedding = music_flamingo.RotaryTimeEmbedding(rope_config())
        cos, sin = time_embedding.cos_sin(3, 2, EMBEDDINGS)
    finally:
        torch.set_default_dtype(default_dtype)
    assert {cos.dtype, sin.dtype, time_embedding.frame_angles.dtype} == {torch.float32}
    assert torch.equal(cos, music_flamingo.RotaryTimeEmbedding(rope_config()).cos_sin(3, 2, 750)[0])


def test_a_device_without_float64_rotates_in_float32_within_the_stated_error() -> None:
    assert music_flamingo.rotation_dtype(torch.device("mps")) == torch.float32
    assert music_flamingo.rotation_dtype(torch.device("cpu")) == torch.float64
    hidden_states = torch.randn(2, EMBEDDINGS, REAL_WIDTH)
    cos, sin = music_flamingo.RotaryTimeEmbedding(rope_config()).cos_sin(38, 2, EMBEDDINGS)
    exact = music_flamingo.rotate(hidden_states, cos, sin)
    rounded = music_flamingo.rotate(hidden_states, cos, sin, torch.float32)
    assert (exact - rounded).abs().max() <= 3e-7 * hidden_states.abs().max()


def test_an_unknown_rope_type_is_refused_by_name() -> None:
    config = rope_config()
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1200.0}
    with pytest.raises(ValueError, match=r"rope_type.*'yarn'"):
        music_flamingo.RotaryTimeEmbedding(config)


# The weights' names


UPLOADED = [
    "audio_tower.conv1.weight",
    "audio_tower.layers.0.self_attn.q_proj.bias",
    "multi_modal_projector.linear_1.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.model.layers.0.self_attn.q_proj.weight",
    "language_model.model.norm.weight",
    "language_model.lm_head.weight",
]


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_of_the_weights_maps_to_vllms_modules(naming: str) -> None:
    mapper = music_flamingo.MusicFlamingoForConditionalGeneration.hf_to_vllm_mapper
    assert mapper.apply_list([NAMINGS[naming](name) for name in UPLOADED]) == UPLOADED


def test_a_stray_time_embedding_in_the_weights_is_ignored() -> None:
    mapper = music_flamingo.MusicFlamingoForConditionalGeneration.hf_to_vllm_mapper
    assert mapper.map_name("audio_tower.pos_emb.freqs") is None
    assert mapper.map_name("model.audio_tower.pos_emb.freqs") is None
    assert mapper.map_name("model.pos_emb.inv_freq") is None


def test_layer_names_of_quantisation_and_lora_are_mapped_too() -> None:
    mapper = music_flamingo.MusicFlamingoForConditionalGeneration.hf_to_vllm_mapper
    mapper = mapper.get_rename_mapper()
    names = ["lm_head", "model.audio_tower", "model.language_model.layers.0.mlp.gate_proj"]
    assert mapper.apply_list(names) == [
        "language_model.lm_head",
        "audio_tower",
        "language_model.model.layers.0.mlp.gate_proj",
    ]


# The multimodal processor


@pytest.fixture(scope="module")
def model_config(random_model: Path) -> Any:
    from vllm.config import ModelConfig

    plugin.check_registered("MusicFlamingoForConditionalGeneration")
    return ModelConfig(model=str(random_model), dtype="float32", max_model_len=8192)


@pytest.fixture(scope="module")
def processor(model_config: Any) -> Any:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    return MULTIMODAL_REGISTRY.create_processor(model_config)


@pytest.fixture(scope="module")
def hf_processor(random_model: Path) -> Any:
    return AutoProcessor.from_pretrained(random_model)


def noise(num_samples: int) -> npt.NDArray[np.float32]:
    generator = np.random.default_rng(num_samples)
    return generator.standard_normal(num_samples, dtype=np.float32) * 0.1


def process(processor: Any, prompt: str | list[int], samples: Any, cache: Any = None) -> Any:
    items = processor.info.parse_mm_data({"audio": [(samples, 16_000)]})
    return processor(prompt, mm_items=items, cache=cache)


TEXT = "<|im_start|>user\n<sound>What is this?<|im_end|>\n"


@pytest.mark.parametrize("seconds", [0.1, 1, 12.3, 29.9, 30, 30.021, 31, 65.5])
@pytest.mark.parametrize("as_text", [True, False], ids=["text", "token ids"])
def test_a_placeholder_widens_as_the_checkpoints_own_processor_widens_it(
    processor: Any, hf_processor: Any, seconds: float, as_text: bool
) -> None:
    samples = noise(round(seconds * 16_000))
    prompt = TEXT if as_text else hf_processor.tokenizer.encode(TEXT)
    expected = hf_processor(text=TEXT, audio=samples)
    processed = process(processor, prompt, samples)
    assert processed["prompt_token_ids"] == expected["input_ids"][0].tolist()
    (item,) = processed["mm_kwargs"]["audio"]
    assert torch.equal(item["input_features"].data, expected["input_features"])
    (placeholder,) = processed["mm_placeholders"]["audio"]
    assert placeholder.get_num_embeds() == placeholder.length - 2  # the boundary tokens


@pytest.mark.parametrize("num_samples", [480_001, 480_160, 480_320, 960_001, 960_320])
def test_a_tail_without_embeddings_takes_no_placeholder(processor: Any, num_samples: int) -> None:
    """1 to 320 samples past a multiple of 30 s: one or two mel frames in a window of their own."""
    (placeholder,) = process(processor, TEXT, noise(num_samples))["mm_placeholders"]["audio"]
    assert placeholder.get_num_embeds() == num_samples // 480_000 * EMBEDDINGS


def test_a_song_from_the_processors_cache_widens_the_prompt_too(
    processor: Any, model_config: Any
) -> None:
    from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache

    cache = LruKeyReplicatedSenderCache(model_config)
    cold, warm = (process(processor, TEXT, noise(200_000), cache) for _ in range(2))
    assert warm["mm_kwargs"]["audio"] == [None]  # the engine has the features already
    assert warm["prompt_token_ids"] == cold["prompt_token_ids"]
    assert warm["mm_placeholders"] == cold["mm_placeholders"]


def test_a_clip_of_less_than_one_embedding_is_refused(processor: Any) -> None:
    with pytest.raises(ValueError, match="too short"):
        process(processor, TEXT, noise(320))


def test_a_prompt_whose_placeholder_is_missing_is_refused(processor: Any) -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        process(processor, "no audio here", noise(16_000))


def test_a_text_only_prompt_stays_as_it_is(processor: Any, hf_processor: Any) -> None:
    text = TEXT.replace("<sound>", "")
    processed = processor(text, mm_items=processor.info.parse_mm_data({}))
    assert processed["prompt_token_ids"] == hf_processor.tokenizer.encode(text)


def test_a_chat_template_of_strings_gets_the_placeholder_as_text() -> None:
    model = music_flamingo.MusicFlamingoForConditionalGeneration
    assert model.get_placeholder_str("audio", 1) == "<sound>"
    with pytest.raises(ValueError, match="takes no image"):
        model.get_placeholder_str("image", 1)


@pytest.mark.parametrize("seq_len", [2048, 8192, 40_000])
def test_the_longest_song_that_memory_is_measured_with_is_what_can_be_heard(
    processor: Any, seq_len: int
) -> None:
    longest = processor.info.get_mm_max_tokens_per_item(seq_len, {"audio": 1})["audio"]
    assert longest == min(seq_len - 2, 1200 * 25)
    inputs = processor.get_dummy_inputs(seq_len, {"audio": 1}, {})
    samples = inputs.mm_data_items["audio"][0]
    assert len(samples) // 640 == longest


# The model with weights


@dataclasses.dataclass(frozen=True)
class Pair:
    """One checkpoint under vLLM's modules and under transformers'."""

    ours: music_flamingo.AudioFlamingo3ForConditionalGeneration
    theirs: Any
    weights: dict[str, torch.Tensor]  # by the uploads' naming


def load_pair(directory: Path, architecture: str) -> Pair:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    plugin.check_registered(architecture)
    args = EngineArgs(model=str(directory), dtype="float32", enforce_eager=True, max_model_len=8192)
    config = args.create_engine_config()
    saved = load_file(directory / "model.safetensors")
    weights = {name.replace("model.model.model.", "model.model."): w for name, w in saved.items()}
    with set_current_vllm_config(config):
        ours = initialize_model(config).eval()
    ours.load_weights(weights.items())
    theirs = getattr(transformers, architecture).from_pretrained(directory).eval()
    return Pair(ours, theirs, weights)


@pytest.fixture(scope="module")
def pair(random_model: Path, parallel_state: None) -> Pair:  # noqa: ARG001
    return load_pair(random_model, "MusicFlamingoForConditionalGeneration")


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_weight_is_loaded_under_every_naming(pair: Pair, naming: str) -> None:
    parameters = dict(pair.ours.named_parameters())
    expected = {name: parameter.clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.zero_()
    stray = [("audio_tower.pos_emb.freqs", torch.ones(3))]
    named = [(NAMINGS[naming](name), weight) for name, weight in pair.weights.items()]
    assert pair.ours.load_weights(named + stray) == parameters.keys()
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)


def mel(window_frames: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random features (windows, 128, 3000) of one song and their mask, frames as given."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(window_frames), 128, WINDOW_FRAMES, generator=generator)
    mask = torch.arange(WINDOW_FRAMES) < torch.tensor(window_frames).unsqueeze(1)
    return features, mask.int()


def embed(pair: Pair, *songs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The embeddings of each song as vLLM would ask for them: all in one call."""
    return pair.ours.embed_multimodal(
        input_features=torch.cat([features for features, _ in songs]),
        feature_attention_mask=torch.cat([mask for _, mask in songs]),
        chunk_counts=torch.tensor([len(features) for features, _ in songs]),
    )


def reference_embeddings(pair: Pair, song: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """transformers' embeddings of the song alone."""
    features, mask = song
    lengths = ((mask.sum(-1) - 1) // 2 + 1 - 2) // 2 + 1
    audio_tokens = torch.full((1, int(lengths.sum())), pair.theirs.config.audio_token_id)
    output = pair.theirs.get_audio_features(features, mask, input_ids=audio_tokens)
    embeddings: torch.Tensor = output.pooler_output
    return embeddings


SONGS = ([3000, 3000, 1200], [3000], [400], [3000, 3000, 3000, 3000, 1000], [3000, 4])


def test_songs_encoded_together_are_each_what_the_reference_makes_of_them(pair: Pair) -> None:
    songs = [mel(frames, seed) for seed, frames in enumerate(SONGS)]
    for song, embeddings in zip(songs, embed(pair, *songs), strict=True):
        torch.testing.assert_close(embeddings, reference_embeddings(pair, song), atol=2e-5, rtol=0)


def test_a_song_is_bit_by_bit_the_same_in_any_company(pair: Pair) -> None:
    songs = [mel(frames, seed) for seed, frames in enumerate(SONGS)]
    alone = [embed(pair, song)[0] for song in songs]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 3]):
        together = embed(pair, *(songs[i] for i in order))
        assert all(torch.equal(alone[i], e) for i, e in zip(order, together, strict=True))


@pytest.mark.parametrize("tail_frames", [1, 2])
def test_a_window_without_embeddings_changes_nothing_for_its_song_or_the_next(
    pair: Pair, tail_frames: int
) -> None:
    features, mask = mel([3000, 3000, tail_frames])
    whole, after = (features[:2], mask[:2]), mel([3000, 700], seed=1)
    with_tail, next_song = embed(pair, (features, mask), after)
    assert len(with_tail) == 2 * EMBEDDINGS
    torch.testing.assert_close(with_tail, reference_embeddings(pair, whole), atol=2e-5, rtol=0)
    torch.testing.assert_close(next_song, reference_embeddings(pair, after), atol=2e-5, rtol=0)


def test_a_long_song_is_encoded_in_slices_with_the_same_result(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    song = mel([3000] * 18 + [100])
    slices: list[int] = []
    hook = pair.ours.audio_tower.conv1.register_forward_pre_hook(
        lambda _, args: slices.append(len(args[0]))
    )
    sliced = embed(pair, song)[0]
    monkeypatch.setattr(music_flamingo, "WINDOWS_PER_SLICE", 64)
    at_once = embed(pair, song)[0]
    hook.remove()
    assert slices == [8, 8, 3, 19]
    torch.testing.assert_close(sliced, at_once, atol=1e-5, rtol=0)


def test_audio_flamingo_3_loads_what_transformers_saved_and_embeds_as_the_reference(
    tmp_path: Path,
    parallel_state: None,  # noqa: ARG001
) -> None:
    """vLLM's own class stops at `language_model.model.model.*`; the registered one does not."""
    architecture: Architecture = "AudioFlamingo3ForConditionalGeneration"
    shape = dataclasses.replace(TINY, architecture=architecture, max_audio_seconds=600)
    write_random_model(tmp_path / "model", shape=shape)
    pair = load_pair(tmp_path / "model", architecture)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert any(name.startswith("language_model.model.model.") for name in saved)
    assert pair.ours.load_weights(saved.items()) == dict(pair.ours.named_parameters()).keys()
    features, mask = mel([3000, 3000, 1200])
    expected = pair.theirs.get_audio_features(features, mask).pooler_output
    embeddings, _ = embed(pair, (features, mask), mel([400], seed=1))
    torch.testing.assert_close(embeddings, expected, atol=2e-5, rtol=0)
