"""Sampling means the same on both engines: the same distribution, penalty and seeds."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter.engine import VllmEngine
from adapter.request import EngineOutput, EngineRequest
from tests.draws import NUM_DRAWS, distribution, p_value, p_value_between
from tests.test_transformers_engine import PROMPTS, SONGS, Bench, assert_same, draw

SETTINGS = [(0.7, 0.9), (1.0, 1.0), (1.6, 0.95)]

request_ids = map(str, itertools.count())


@pytest.fixture(scope="module")
def bench(random_model: Path) -> Iterator[Bench]:
    """The same checkpoint under Hugging Face alone and under the transformers engine."""
    bench = Bench(random_model)
    yield bench
    asyncio.run(bench.engine.shutdown())


async def answer(engine: VllmEngine, request: EngineRequest) -> EngineOutput:
    """All of a request's answer as one output."""
    prepared = await engine.prepare(replace(request, request_id=f"sampling-{next(request_ids)}"))
    outputs = [output async for output in engine.generate([prepared])]
    return replace(outputs[-1], token_ids=tuple(i for o in outputs for i in o.token_ids))


async def draw_on_vllm(
    engine: VllmEngine, bench: Bench, *, temperature: float, top_p: float
) -> Counter[int]:
    """The first tokens that as many seeds give, of as many requests at once."""
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    request = bench.request(PROMPTS[0], SONGS[0], max_new_tokens=1, **sampling)
    outputs = await asyncio.gather(
        *(
            answer(engine, replace(request, sampling=replace(request.sampling, seed=seed)))
            for seed in range(NUM_DRAWS)
        )
    )
    return Counter(output.token_ids[0] for output in outputs)


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
async def test_the_engines_draw_from_one_distribution(
    vllm_engine: VllmEngine, bench: Bench, temperature: float, top_p: float
) -> None:
    """That of the reference's logits. The seeds make the draws the same in each run."""
    logits = bench.reference.first_logits(SONGS[0], PROMPTS[0])
    expected = distribution(logits, temperature=temperature, top_p=top_p)
    on_vllm = await draw_on_vllm(vllm_engine, bench, temperature=temperature, top_p=top_p)
    on_transformers = await draw(bench, temperature=temperature, top_p=top_p)
    p_values = {
        "vLLM and the reference": p_value(on_vllm, expected),
        "transformers and the reference": p_value(on_transformers, expected),
        "vLLM and transformers": p_value_between(on_vllm, on_transformers),
    }
    print(f"temperature {temperature}, top_p {top_p}, {len(expected)} tokens: {p_values}")
    assert all(p > 0.001 for p in p_values.values()), p_values


async def test_another_temperature_or_top_p_would_be_noticed(bench: Bench) -> None:
    """What the test above is worth: near misses have no chance."""
    logits = bench.reference.first_logits(SONGS[0], PROMPTS[0])
    drawn = await draw(bench, temperature=0.7, top_p=0.9)
    for temperature, top_p in ((0.8, 0.9), (1.0, 0.9), (0.7, 0.8), (0.7, 0.6)):
        other = distribution(logits, temperature=temperature, top_p=top_p)
        assert p_value(drawn, other) < 0.001, (temperature, top_p)


async def test_no_top_k_is_hidden(vllm_engine: VllmEngine, bench: Bench) -> None:
    """20 is what this checkpoint's generation_config.json asks for."""
    drawn = await draw_on_vllm(vllm_engine, bench, temperature=2.0, top_p=1.0)
    logits = bench.reference.first_logits(SONGS[0], PROMPTS[0])
    best = set(np.argsort(-logits)[:50].tolist())
    assert len(set(drawn) - best) > 10


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
@pytest.mark.parametrize("samples", [None, SONGS[3]], ids=["text", "audio"])
async def test_the_repetition_penalty_is_the_references_on_both(
    vllm_engine: VllmEngine, bench: Bench, penalty: float, samples: Any
) -> None:
    for prompt in PROMPTS[:3]:
        expected = bench.reference.answer(samples, prompt, 24, repetition_penalty=penalty)
        request = bench.request(prompt, samples, max_new_tokens=24, repetition_penalty=penalty)
        (on_transformers,) = await bench.answer(request)
        assert_same(on_transformers, expected)
        assert_same(await answer(vllm_engine, request), expected)


async def test_an_answer_that_repeats_itself_ends_at_the_same_token_on_both(
    vllm_engine: VllmEngine, bench: Bench
) -> None:
    """A penalty below 1 makes circles."""
    reasons = []
    for prompt, penalty in itertools.product(PROMPTS, (0.2, 0.8)):
        sampling = {"max_new_tokens": 80, "repetition_penalty": penalty}
        request = bench.request(prompt, SONGS[3], stop_on_repetition=True, **sampling)
        (on_transformers,) = await bench.answer(request)
        on_vllm = await answer(vllm_engine, request)
        assert on_vllm.token_ids == on_transformers.token_ids
        assert on_vllm.finish_reason == on_transformers.finish_reason
        reasons.append(on_vllm.finish_reason)
    assert reasons.count("repetition") >= 3


async def test_a_seed_gives_the_same_answer_whatever_is_in_the_batch(
    vllm_engine: VllmEngine, bench: Bench
) -> None:
    drawn = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "max_new_tokens": 24}
    seeded = [bench.request(PROMPTS[0], SONGS[0], seed=seed, **drawn) for seed in (0, 2**63 - 1)]
    others = [
        bench.request(p, s, seed=seed, **drawn)
        for seed, (p, s) in enumerate(itertools.product(PROMPTS, (None, *SONGS[1:4])))
    ]
    greedy = [bench.request(p, SONGS[4], max_new_tokens=24) for p in PROMPTS]
    alone = [(await answer(vllm_engine, request)).token_ids for request in seeded]
    beside = [others[:9], greedy, [*seeded[::-1], *others, *greedy]]
    for company in beside:
        outputs = await asyncio.gather(
            *(answer(vllm_engine, request) for request in (*company, *seeded))
        )
        assert [output.token_ids for output in outputs[-2:]] == alone
    assert alone[0] != alone[1]


async def test_a_seed_means_the_same_however_a_prompt_is_cut_into_parts(
    vllm_engine: VllmEngine, async_llm: Any, bench: Bench
) -> None:
    """A song of 2,400 tokens takes two steps alone, and others beside prompts that share the steps;
    after each but the last a token is drawn and thrown away."""
    drawn = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "max_new_tokens": 24}
    seeded = bench.request(PROMPTS[0], SONGS[4], seed=11, **drawn)
    others = [bench.request(p, s, seed=5, **drawn) for p in PROMPTS for s in (None, *SONGS[:4])]
    answers = []
    for company in ([], others[:1], others[:7], others):
        assert await async_llm.reset_prefix_cache()
        outputs = await asyncio.gather(
            *(answer(vllm_engine, request) for request in (*company, seeded))
        )
        answers.append(outputs[-1])
    warm = await answer(vllm_engine, seeded)
    assert warm.cached_tokens > answers[0].cached_tokens == 0
    assert len({output.token_ids for output in (*answers, warm)}) == 1


async def test_a_seed_that_nobody_sent_is_another_each_time(
    vllm_engine: VllmEngine, bench: Bench
) -> None:
    request = bench.request(PROMPTS[0], do_sample=True, max_new_tokens=24)
    outputs = await asyncio.gather(*(answer(vllm_engine, request) for _ in range(4)))
    assert len({output.token_ids for output in outputs}) == 4
