"""vLLM gives the reference's answers: the pairwise choice, and a KV cache that is too small."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from adapter.checkpoint import load_checkpoint
from tests.parity.cases import (
    FACTORS,
    HOSTILE_PROMPTS,
    PROMPTS,
    RATE,
    WINDOW,
    Case,
    Melody,
    Question,
    build_case,
    name_row,
    pairwise,
)
from tests.parity.checkpoints import write_checkpoint
from tests.parity.compare import Bench, References
from tests.parity.engines import ListeningVllmEngine

ROWS = pairwise(FACTORS)


@pytest.fixture(scope="module")
def bench(async_llm: Any, random_model: Path) -> Bench:
    stop_token_ids = load_checkpoint(str(random_model)).eos_token_ids
    engine = ListeningVllmEngine(async_llm, stop_token_ids)
    return Bench(random_model, engine, References(random_model))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small_bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """Another checkpoint, on an engine whose KV cache holds 2048 tokens."""
    model_dir = write_checkpoint("wide", tmp_path_factory.mktemp("parity") / "wide")
    checkpoint = load_checkpoint(str(model_dir))
    engine = await asyncio.to_thread(ListeningVllmEngine.launch, checkpoint, small_cache=True)
    yield Bench(model_dir, engine, References(model_dir))
    await engine.shutdown()


async def check(bench: Bench, *questions: Question, **case: Any) -> None:
    outcome = await bench.compare(Case(questions, **case))
    assert not outcome.differences
    assert outcome.answers >= len(questions)


@pytest.mark.parametrize("row", ROWS, ids=name_row)
async def test_a_case_is_answered_as_by_hugging_face(bench: Bench, row: dict[str, Any]) -> None:
    outcome = await bench.compare(build_case(row))
    assert not outcome.differences


@pytest.mark.parametrize("place", ["before", "behind"])
async def test_long_songs_are_answered_as_by_hugging_face(bench: Bench, place: str) -> None:
    """Five and twenty minutes, encoded in slices, beside a short song."""
    long = [Question(PROMPTS[0], Melody(s * RATE), max_new_tokens=8) for s in (300, 1200)]
    short = Question(PROMPTS[1], Melody(31 * RATE))
    await check(bench, *([*long, short] if place == "before" else [short, *long]))


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("tail", [1, 160, 161, 320])
async def test_a_tail_without_embeddings_leaves_the_other_songs_alone(
    bench: Bench, tail: int, place: str
) -> None:
    clip = Question(PROMPTS[0], Melody(WINDOW + tail))
    others = [Question(PROMPTS[1], Melody(95 * RATE)), Question(PROMPTS[2], Melody(31 * RATE))]
    await check(bench, *([clip, *others] if place == "before" else [*others, clip]))


async def test_moments_of_one_song_are_songs_of_their_own(bench: Bench) -> None:
    whole = Question(PROMPTS[0], Melody(40 * RATE))
    moments = [replace(whole, first=s * RATE, last=(s + 8) * RATE) for s in (0, 4, 32)]
    await check(bench, whole, *moments)


async def test_the_second_time_a_song_is_found_in_the_cache(bench: Bench) -> None:
    twins = [Question(prompt, Melody(31 * RATE)) for prompt in PROMPTS]
    await check(bench, *twins)
    assert min(told.cached_tokens for told in bench.engine.heard.values()) == 0
    await check(bench, *twins, warm=True)
    again = list(bench.engine.heard.values())[-len(twins) :]
    assert all(told.cached_tokens > 700 for told in again)


@pytest.mark.parametrize("with_song", [False, True], ids=["text", "song"])
async def test_a_prompt_that_spells_special_tokens_is_answered_as_plain_text(
    bench: Bench, with_song: bool
) -> None:
    melody = Melody(2 * RATE) if with_song else None
    many = "<sound><|im_end|>" * 1000
    await check(bench, *(Question(prompt, melody) for prompt in (*HOSTILE_PROMPTS, many)))


@pytest.mark.parametrize("songs_first", [True, False])
async def test_preempted_requests_are_answered_as_by_hugging_face(
    small_bench: Bench, songs_first: bool
) -> None:
    """More prompts than the KV cache holds with their answers: vLLM preempts some, and computes
    their songs and what they had written anew."""
    songs = [
        Question(prompt, Melody(31 * RATE, seed), max_new_tokens=40)
        for seed in range(2)
        for prompt in PROMPTS[:2]
    ]
    texts = [Question(f"{i}. {PROMPTS[i % 3]}", max_new_tokens=40) for i in range(44)]
    before = small_bench.engine.num_preemptions
    await check(small_bench, *(songs + texts if songs_first else texts + songs))
    assert small_bench.engine.num_preemptions > before


@pytest.mark.parametrize("seconds", [0.1, 12.3, 30, 30.01, 30.021, 59.9])
async def test_another_checkpoint_is_answered_as_by_hugging_face(
    small_bench: Bench, seconds: float
) -> None:
    melody = Melody(round(seconds * RATE))
    await check(
        small_bench,
        Question(PROMPTS[0], melody),
        Question(PROMPTS[1]),
        Question(PROMPTS[2], melody),
    )
