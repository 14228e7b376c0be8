"""A random checkpoint is a real one of its architecture, and its answers are worth comparing."""

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from adapter.random_model import SMALL, TINY, build_model, build_tokenizer, write_random_model

AUDIO_FLAMINGO_3 = dataclasses.replace(
    TINY, architecture="AudioFlamingo3ForConditionalGeneration", max_audio_seconds=600
)
AUDIO_FLAMINGO_NEXT = dataclasses.replace(
    TINY, max_audio_seconds=1800, context_tokens=131_072, rope_theta=15.3e6
)
VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128)
PROMPTS = ("Describe this music.", "What is the tempo?", "Name the instruments.", "Who sings?")


def song(seed: int, num_seconds: float) -> np.ndarray:
    """Four tones that swell and fade, and some noise; mono float32 at 16 kHz."""
    random = np.random.default_rng(seed)
    time = np.arange(int(16_000 * num_seconds)) / 16_000
    tones = [
        np.sin(2 * np.pi * pitch * time) * np.sin(np.pi * swell * time) ** 2
        for pitch, swell in zip(random.uniform(80, 2000, 4), random.uniform(0.2, 2, 4), strict=True)
    ]
    return (0.1 * sum(tones) + 0.02 * random.standard_normal(len(time))).astype(np.float32)


def load(directory: Path) -> tuple[Any, Any]:
    """The model and its processor, once it is sure that every weight found its place."""
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    model, loading = getattr(transformers, architecture).from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.eval(), transformers.AutoProcessor.from_pretrained(directory)


def answer(model: Any, processor: Any, prompt: str, samples: np.ndarray) -> tuple[list[int], Any]:
    """64 greedy tokens and the logits (steps, vocabulary) that they were chosen by."""
    content = [{"type": "audio", "audio": samples}, {"type": "text", "text": prompt}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
    )
    made = model.generate(
        **inputs,
        max_new_tokens=64,
        do_sample=False,
        repetition_penalty=1.0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(made.logits)


@pytest.fixture(scope="module")
def answers(random_model: Path) -> dict[tuple[int, str], tuple[list[int], Any]]:
    """What the checkpoint says of two songs, one of them longer than a window."""
    model, processor = load(random_model)
    songs = {1: song(1, 12.3), 2: song(2, 45.0)}
    return {
        (seed, prompt): answer(model, processor, prompt, samples)
        for seed, samples in songs.items()
        for prompt in PROMPTS
    }


def test_every_song_and_every_prompt_gets_an_answer_of_its_own(answers: Any) -> None:
    assert len({tuple(token_ids) for token_ids, _ in answers.values()}) == len(answers)


def test_answers_are_varied(answers: Any) -> None:
    for token_ids, _ in answers.values():
        assert len(set(token_ids)) > len(token_ids) / 4


def test_the_best_token_is_mostly_clear(answers: Any) -> None:
    logits = torch.cat([logits for _, logits in answers.values()])

    best = logits.topk(2).values

    margins = best[:, 0] - best[:, 1]
    assert (margins > 1e-3).float().mean() > 0.99
    assert (margins > 1e-2).float().mean() > 0.97


def test_some_answers_end_by_themselves_and_some_at_the_cap(answers: Any) -> None:
    lengths = [len(token_ids) for token_ids, _ in answers.values()]

    assert min(lengths) < 64 == max(lengths)


@pytest.mark.parametrize("shape", [AUDIO_FLAMINGO_3, AUDIO_FLAMINGO_NEXT], ids=["af3", "af-next"])
def test_the_rest_of_the_family_loads_and_answers(tmp_path: Path, shape: Any) -> None:
    write_random_model(tmp_path / "model", shape=shape)

    model, processor = load(tmp_path / "model")

    assert type(model).__name__ == shape.architecture
    assert model.config.text_config.max_position_embeddings == shape.context_tokens
    assert processor.max_audio_len == shape.max_audio_seconds
    assert answer(model, processor, "What is the tempo?", song(1, 2.0))[0]


def test_the_same_seed_writes_the_same_bytes(random_model: Path, tmp_path: Path) -> None:
    write_random_model(tmp_path / "again")
    write_random_model(tmp_path / "other", seed=1)

    weights = "model.safetensors"
    for file in random_model.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    assert (tmp_path / "other" / weights).read_bytes() != (random_model / weights).read_bytes()


def test_no_network_is_needed(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)

    write_random_model(tmp_path / "model")
    load(random_model)


def test_a_directory_that_holds_anything_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")

    with pytest.raises(FileExistsError, match="not an empty directory"):
        write_random_model(tmp_path)

    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_sampling_defaults_lie_in_wait_as_in_the_real_checkpoints(random_model: Path) -> None:
    defaults = json.loads((random_model / "generation_config.json").read_text())

    assert defaults["do_sample"] is True
    assert (defaults["temperature"], defaults["top_k"], defaults["top_p"]) == (0.7, 20, 0.8)
    assert defaults["repetition_penalty"] == 1.05


@pytest.mark.parametrize(("shape", "millions"), [(TINY, 0.7), (SMALL, 37)])
def test_the_shapes_have_their_size_and_heads_that_vllm_takes(shape: Any, millions: float) -> None:
    model = build_model(build_tokenizer(), seed=0, shape=shape)

    assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=0.05)
    assert shape.hidden_size / shape.num_heads in VLLM_CPU_HEAD_SIZES
    assert shape.encoder_hidden_size / shape.encoder_heads in VLLM_CPU_HEAD_SIZES


def test_the_audio_stands_before_all_text_of_its_turn(random_model: Path) -> None:
    processor = transformers.AutoProcessor.from_pretrained(random_model)
    content = [{"type": "text", "text": "What is this?"}, {"type": "audio", "path": "song.wav"}]

    prompt = processor.apply_chat_template([{"role": "user", "content": content}])

    assert "<|im_start|>user\n<sound>What is this?<|im_end|>" in prompt
    assert prompt.startswith("<|im_start|>system\n")


def test_a_system_prompt_of_the_conversation_replaces_the_default(random_model: Path) -> None:
    processor = transformers.AutoProcessor.from_pretrained(random_model)
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a chord?"},
    ]

    prompt = processor.apply_chat_template(conversation, add_generation_prompt=True)

    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is a chord?<|im_end|>\n<|im_start|>assistant\n"
    )
