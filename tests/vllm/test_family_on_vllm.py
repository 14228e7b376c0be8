"""Audio Flamingo 3 in an engine of its own; `make family` runs the whole family so."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.family import FAMILY
from tests.vllm.family import (
    LENGTHS_SECONDS,
    FamilyEngine,
    compare,
    compare_past_the_limit,
    family_engine,
)
from tests.vllm.test_music_flamingo import song


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def member(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FamilyEngine]:
    """Ends before the next module's tests: two engines at a time would need twice the memory."""
    directory = tmp_path_factory.mktemp("family") / "audio-flamingo-3"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        environment.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        async with family_engine("audio-flamingo-3", directory) as engine:
            yield engine


async def test_clips_alone_and_together_are_answered_as_by_hugging_face(
    member: FamilyEngine,
) -> None:
    """Without boundary tokens and without time embedding; a text-only prompt is among them."""
    worst = await compare(member, [None, *map(song, LENGTHS_SECONDS)])
    print(f"worst log-probability difference {worst:.1e}")
    assert worst < 1e-3
    assert sum(answer.decided() for answer in member.answers.values()) > 72


async def test_a_song_past_the_limit_is_heard_up_to_it(member: FamilyEngine) -> None:
    limit_seconds = FAMILY["audio-flamingo-3"].max_clip_seconds
    assert await compare_past_the_limit(member, limit_seconds + 40) < 1e-3
