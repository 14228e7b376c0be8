"""The plugin in a real engine against Hugging Face's own processor and `generate()`, in float32."""

import asyncio
import base64
import io
import itertools
import wave
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest

from tests.reference import Reference, ReferenceAnswer

PROMPT = "Describe this music."
MAX_NEW_TOKENS = 24
CLIP_SECONDS = (1.0, 12.3, 29.9, 30.0, 31.0, 65.5, 95.0)

request_ids = map(str, itertools.count())


def song(seconds: float) -> npt.NDArray[np.float32]:
    """A melody of its own for each length, with some noise: samples that 16 bits hold exactly."""
    num_samples = round(seconds * 16_000)
    generator = np.random.default_rng(num_samples)
    pitches = 220 * 2 ** (generator.integers(0, 24, num_samples // 4000 + 1) / 12)
    phase = np.cumsum(np.repeat(pitches, 4000)[:num_samples]) * 2 * np.pi / 16_000
    noise = generator.standard_normal(num_samples)
    samples = 0.3 * np.sin(phase) + 0.02 * noise
    return (np.round(samples * 32_768) / 32_768).astype(np.float32)


@pytest.fixture(scope="module")
def reference(random_model: Path) -> Reference:
    return Reference(random_model)


@pytest.fixture(scope="module")
def answers(reference: Reference) -> dict[float, ReferenceAnswer]:
    return {s: reference.answer(song(s), PROMPT, MAX_NEW_TOKENS) for s in CLIP_SECONDS}


def one_placeholder_ids(reference: Reference, *, audio: bool = True) -> list[int]:
    """The prompt as the adapter sends it: the chat template's ids, the audio token once."""
    content: list[dict[str, Any]] = [{"type": "audio"}] if audio else []
    content.append({"type": "text", "text": PROMPT})
    text = reference.processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return list(reference.processor.tokenizer.encode(text))


async def ask(
    llm: Any, reference: Reference, samples: npt.NDArray[np.float32] | None, uuid: str = ""
) -> Any:
    """The engine's output for one prompt: greedy, with the chosen tokens' log-probabilities."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompt: dict[str, Any] = {
        "prompt_token_ids": one_placeholder_ids(reference, audio=samples is not None)
    }
    if samples is not None:
        prompt["multi_modal_data"] = {"audio": [(samples, 16_000)]}
        prompt["multi_modal_uuids"] = {"audio": [uuid or f"{len(samples)} samples"]}
    params = SamplingParams(
        max_tokens=MAX_NEW_TOKENS,
        temperature=0.0,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    (output,) = [out async for out in llm.generate(prompt, params, next(request_ids))]
    return output


async def forget(llm: Any) -> None:
    """Empty every cache, so that songs are encoded and prefilled anew."""
    await llm.reset_mm_cache()
    await llm.reset_encoder_cache()
    assert await llm.reset_prefix_cache()


def assert_same(output: Any, expected: ReferenceAnswer) -> None:
    completion = output.outputs[0]
    decided = expected.decided()
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert list(completion.token_ids)[:decided] == expected.token_ids[:decided]
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    logprobs = [step[token_id].logprob for token_id, step in steps]
    assert logprobs[:decided] == pytest.approx(expected.logprobs[:decided], abs=1e-3)


def test_the_reference_answers_are_worth_comparing(answers: dict[float, ReferenceAnswer]) -> None:
    """Not one token for ever, not one answer for all, and hardly a tie."""
    assert len({tuple(answer.token_ids) for answer in answers.values()}) > 1
    assert all(len(set(answer.token_ids)) > 3 for answer in answers.values())
    decided = sum(answer.decided() for answer in answers.values())
    assert decided >= 0.9 * sum(len(answer.token_ids) for answer in answers.values())


@pytest.mark.parametrize("seconds", CLIP_SECONDS)
async def test_a_clip_alone_is_answered_as_by_hugging_face(
    async_llm: Any, reference: Reference, answers: dict[float, ReferenceAnswer], seconds: float
) -> None:
    await forget(async_llm)
    cold = await ask(async_llm, reference, song(seconds))
    warm = await ask(async_llm, reference, song(seconds))
    assert_same(cold, answers[seconds])
    assert_same(warm, answers[seconds])
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens > 0 or seconds == 1.0  # a second is less than one block


@pytest.mark.parametrize(
    "order", [CLIP_SECONDS, CLIP_SECONDS[::-1]], ids=["ascending", "descending"]
)
async def test_songs_encoded_together_do_not_change_each_other(
    async_llm: Any,
    reference: Reference,
    answers: dict[float, ReferenceAnswer],
    order: tuple[float, ...],
) -> None:
    await forget(async_llm)
    outputs = await asyncio.gather(*(ask(async_llm, reference, song(s)) for s in order))
    for seconds, output in zip(order, outputs, strict=True):
        assert_same(output, answers[seconds])


@pytest.mark.parametrize("tail_samples", [1, 160, 161, 320])
async def test_a_tail_without_embeddings_is_as_if_the_clip_were_cut_there(
    async_llm: Any, reference: Reference, answers: dict[float, ReferenceAnswer], tail_samples: int
) -> None:
    """Hugging Face fails on such a clip, so its answer to the cut clip is the reference."""
    await forget(async_llm)
    with_tail = np.concatenate((song(30.0), song(1.0)[:tail_samples]))
    outputs = await asyncio.gather(
        ask(async_llm, reference, with_tail), ask(async_llm, reference, song(95.0))
    )
    assert_same(outputs[0], answers[30.0])
    assert_same(outputs[1], answers[95.0])


async def test_a_text_only_prompt_is_answered_beside_songs(
    async_llm: Any, reference: Reference, answers: dict[float, ReferenceAnswer]
) -> None:
    outputs = await asyncio.gather(
        ask(async_llm, reference, None), ask(async_llm, reference, song(31.0))
    )
    assert_same(outputs[0], reference.answer(None, PROMPT, MAX_NEW_TOKENS))
    assert_same(outputs[1], answers[31.0])


def wav(samples: npt.NDArray[np.float32]) -> str:
    """base64 of a 16-bit WAV file."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((samples * 32_768).astype("<i2").tobytes())
    return base64.b64encode(buffer.getvalue()).decode()


async def openai_client(llm: Any, model: str) -> openai.AsyncOpenAI:
    """A client of vLLM's own OpenAI server, which runs over the engine in this process."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model])
    app = build_app(args, ("generate",), llm.model_config)
    await init_app_state(llm, app.state, args, ("generate",))
    transport = httpx.ASGITransport(app)
    return openai.AsyncOpenAI(
        api_key="none",
        base_url="http://vllm.test/v1",
        http_client=httpx.AsyncClient(transport=transport),
    )


async def test_vllms_own_openai_server_answers_about_a_song_as_hugging_face_does(
    async_llm: Any, reference: Reference, answers: dict[float, ReferenceAnswer], random_model: Path
) -> None:
    client = await openai_client(async_llm, str(random_model))
    audio = {"type": "input_audio", "input_audio": {"data": wav(song(31.0)), "format": "wav"}}
    completion = await client.chat.completions.create(
        model=str(random_model),
        messages=[{"role": "user", "content": [audio, {"type": "text", "text": PROMPT}]}],  # type: ignore[list-item]
        temperature=0,
        max_tokens=MAX_NEW_TOKENS,
    )
    expected = answers[31.0]
    text = reference.processor.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert completion.choices[0].message.content == text
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(expected.prompt_token_ids)
