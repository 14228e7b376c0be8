"""Every checkpoint of the family, as a tiny one of its architecture, on the transformers engine."""

import asyncio
import io
import json
import wave
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from adapter.api import create_app
from adapter.audio import Song, cut
from adapter.random_model import write_random_model
from adapter.request import SAMPLING_RATE
from adapter.settings import load_settings
from tests.family import FAMILY, Member
from tests.reference import Reference
from tests.test_api import ready
from tests.test_transformers_engine import PROMPTS, Bench, assert_same, song

LENGTHS_SECONDS = (0.1, 12.3, 31.0, 95.0)
SONGS = tuple(song(seconds, seed) for seed, seconds in enumerate(LENGTHS_SECONDS, start=60))


@pytest.fixture(scope="module", params=FAMILY)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def member(name: str) -> Member:
    return FAMILY[name]


@pytest.fixture(scope="module")
def model(name: str, member: Member, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("family") / name
    write_random_model(directory, shape=member.shape)
    return directory


@pytest.fixture(scope="module")
def bench(model: Path) -> Iterator[Bench]:
    bench = Bench(model)
    yield bench
    asyncio.run(bench.engine.shutdown())


async def test_songs_in_one_call_get_the_reference_answers(bench: Bench) -> None:
    rows = list(zip(PROMPTS, SONGS, strict=False))
    outputs = await bench.answer(*(bench.request(p, s, max_new_tokens=24) for p, s in rows))
    decided = 0
    for output, (prompt, samples) in zip(outputs, rows, strict=True):
        answer = bench.reference.answer(samples, prompt, 24)
        assert_same(output, answer)
        decided += answer.decided()
    assert decided > 32


async def test_text_only_prompts_get_the_reference_answers(bench: Bench) -> None:
    outputs = await bench.answer(*(bench.request(p, max_new_tokens=24) for p in PROMPTS))
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert_same(output, bench.reference.answer(None, prompt, 24))


def test_the_limits_are_read_from_the_checkpoint(bench: Bench, member: Member) -> None:
    checkpoint = bench.checkpoint
    assert checkpoint.context_tokens == member.context_tokens
    assert checkpoint.max_clip_seconds() == member.max_clip_seconds
    assert checkpoint.num_boundary_tokens == member.num_boundary_tokens
    assert checkpoint.num_audio_tokens(3600 * SAMPLING_RATE) == 25 * member.max_clip_seconds


def test_the_rotary_bases_are_the_checkpoints(bench: Bench, member: Member) -> None:
    """A constant in the engine would stand out: Audio Flamingo Next has others."""
    config = bench.engine._model.config
    assert config.text_config.rope_parameters["rope_theta"] == member.shape.rope_theta
    if member.num_boundary_tokens:
        assert config.max_position_embeddings == member.max_clip_seconds


@pytest.mark.parametrize("excess_seconds", [-0.5, 0.0, 0.01, 30.0])
def test_what_is_longer_than_the_limit_is_truncated_there(
    bench: Bench, member: Member, excess_seconds: float
) -> None:
    limit_samples = member.max_clip_seconds * SAMPLING_RATE
    num_samples = limit_samples + round(excess_seconds * SAMPLING_RATE)
    whole = Song(
        np.zeros(num_samples, dtype=np.float32), num_samples / SAMPLING_RATE, "digest", 0.0
    )
    clip = cut(
        whole,
        start_seconds=None,
        end_seconds=None,
        max_seconds=bench.checkpoint.max_clip_seconds(),
        audible=bench.checkpoint.audible_samples,
    )
    assert clip.truncated == (excess_seconds > 0)
    assert len(clip.samples) == min(num_samples, limit_samples)


@asynccontextmanager
async def serving(model: Path) -> Any:
    settings = {
        "ADAPTER_MODEL": str(model),
        "ADAPTER_ENGINE": "transformers",
        "ADAPTER_DTYPE": "float32",
    }
    app = create_app(load_settings(settings))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=300) as http,
    ):
        await ready(http)
        yield http


async def ask(http: httpx.AsyncClient, samples: np.ndarray | None, **body: Any) -> Any:
    """POST /generate with the samples as a 16-bit WAV file."""
    files: dict[str, Any] = {"request": (None, json.dumps(body), "application/json")}
    if samples is not None:
        files["audio"] = ("song.wav", wav(samples))
    return (await http.post("/generate", files=files)).json()


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLING_RATE)
        writer.writeframes(as_16_bit(samples).tobytes())
    return file.getvalue()


def as_16_bit(samples: np.ndarray) -> np.ndarray:
    return np.round(samples * 32_768).astype("<i2")


async def test_a_song_past_the_limit_is_answered_as_hugging_face_hears_it(
    tmp_path: Path,
) -> None:
    """Hugging Face's processor cuts at the checkpoint's limit by itself: 600 s here."""
    model = tmp_path / "audio-flamingo-3"
    write_random_model(model, shape=FAMILY["audio-flamingo-3"].shape)
    samples = song(640.0, seed=70)
    reference = Reference(model)
    heard = as_16_bit(samples).astype(np.float32) / 32_768
    expected = reference.answer(heard, PROMPTS[0], 16)
    async with serving(model) as http:
        answer = await ask(http, samples, prompt=PROMPTS[0], max_new_tokens=16)
    assert answer["audio"] == {
        "duration_seconds": 640.0,
        "start_seconds": 0.0,
        "heard_seconds": 600.0,
        "truncated": True,
    }
    assert answer["usage"]["audio_tokens"] == 15_000
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert expected.decided() > 8
    text = reference.processor.tokenizer.decode(expected.token_ids[: expected.decided()])
    assert answer["response"].startswith(text)


async def test_a_think_checkpoints_reasoning_stands_apart_from_its_response(
    tmp_path: Path,
) -> None:
    model = tmp_path / "music-flamingo-think"
    write_random_model(model, shape=FAMILY["music-flamingo-think"].shape)
    reference = Reference(model)
    thought, answered = 0, 0
    async with serving(model) as http:
        for prompt in PROMPTS:
            got = await ask(http, None, prompt=prompt, max_new_tokens=48)
            token_ids = reference.answer(None, prompt, 48).token_ids
            text = reference.processor.tokenizer.decode(token_ids, skip_special_tokens=True)
            reasoning, closed, response = text.removeprefix("<think>").partition("</think>")
            assert text.startswith("<think>")
            assert got["reasoning"] == reasoning.strip()
            assert got["response"] == response.lstrip()
            thought += 1
            answered += bool(closed)
    assert 0 < answered < thought  # some are cut or end before their answer


# Long songs


@pytest.mark.parametrize("name", ["music-flamingo", "audio-flamingo-3"], indirect=True)
async def test_a_long_song_is_encoded_in_slices_of_windows_with_the_same_result(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = song(30 * 9 + 2.5, seed=80)
    slices: list[int] = []
    hook = bench.engine._model.model.audio_tower.conv1.register_forward_pre_hook(
        lambda _, args: slices.append(len(args[0]))
    )
    prepared = await bench.engine.prepare(bench.request(PROMPTS[0], samples))
    with torch.inference_mode():
        sliced = bench.engine._encode(prepared)
        monkeypatch.setattr("adapter.transformers_engine.WINDOWS_PER_SLICE", 64)
        at_once = bench.engine._encode(prepared)
        inputs = bench.reference.inputs(samples, PROMPTS[0])
        del inputs["attention_mask"]
        if not bench.engine._encodes_with_ids:
            del inputs["input_ids"]
        theirs = bench.reference.model.get_audio_features(**inputs, return_dict=True).pooler_output
    hook.remove()
    assert slices == [8, 2, 10]
    assert torch.equal(at_once, theirs)
    torch.testing.assert_close(sliced, theirs, atol=2e-5, rtol=0)


def test_every_kind_of_checkpoint_of_the_family_is_there() -> None:
    repositories = [name for member in FAMILY.values() for name in member.repositories]
    assert len(repositories) == len(set(repositories)) == 7
