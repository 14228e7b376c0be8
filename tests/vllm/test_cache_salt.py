"""The prefix cache of vLLM tells no key's holder what another has sent."""

from dataclasses import replace
from pathlib import Path

import pytest

from adapter.checkpoint import load_checkpoint
from adapter.engine import VllmEngine
from adapter.prompting import Prompter
from adapter.request import EngineRequest, Sampling
from tests.test_transformers_engine import SONGS, new_clip
from tests.vllm.test_sampling import answer


@pytest.fixture(params=["text", "song"])
def plain(request: pytest.FixtureRequest, random_model: Path) -> EngineRequest:
    """A request that is long enough to be cached, without a salt."""
    checkpoint = load_checkpoint(str(random_model))
    with_song = request.param == "song"
    text = "salted " * 300 + "or not?"
    return EngineRequest(
        "plain",
        Prompter(checkpoint).encode(text, with_audio=with_song),
        new_clip(SONGS[0]) if with_song else None,
        checkpoint.num_audio_tokens(len(SONGS[0])) if with_song else 0,
        Sampling(max_new_tokens=4),
    )


async def test_only_requests_of_one_salt_find_a_prefix_in_the_cache(
    vllm_engine: VllmEngine, plain: EngineRequest
) -> None:
    salts = ["ann", "ann", "bob", None, None, "bob"]
    outputs = [await answer(vllm_engine, replace(plain, cache_salt=salt)) for salt in salts]
    found = [output.cached_tokens > 100 for output in outputs]
    assert found == [False, True, False, False, True, True]
    assert len({output.token_ids for output in outputs}) == 1
