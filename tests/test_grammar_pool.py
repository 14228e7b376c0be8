"""Grammars are compiled in a process with limits before an engine gets them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from adapter.checkpoint import load_checkpoint
from adapter.errors import UnprocessableError
from adapter.grammar import to_grammar
from adapter.grammar_pool import GrammarPool
from tests.test_grammar import SONG

# An automaton of many millions of states.
BOMB = to_grammar({"type": "string", "pattern": "^((((a{0,99}b){0,99}c){0,99}d){0,99}e){0,99}$"})


@pytest_asyncio.fixture
async def pool(random_model: Path) -> AsyncIterator[GrammarPool]:
    checkpoint = load_checkpoint(str(random_model))
    pool = GrammarPool(checkpoint.path, checkpoint.vocab_size, timeout_seconds=5)
    yield pool
    await pool.close()


async def test_a_bomb_is_refused_in_time_and_what_is_sound_is_taken_after_it(
    pool: GrammarPool,
) -> None:
    await pool.check(to_grammar(SONG))
    with pytest.raises(UnprocessableError) as caught:
        await pool.check(BOMB)
    assert (caught.value.code, caught.value.field) == ("invalid_schema", "json_schema")
    await pool.check(to_grammar({"type": "boolean"}))


async def test_what_came_of_a_grammar_is_remembered(pool: GrammarPool) -> None:
    for grammar in (BOMB, to_grammar(SONG)):
        for _ in range(2):
            try:
                await pool.check(grammar)
            except UnprocessableError:
                assert grammar == BOMB
    await pool.close()
    async with asyncio.timeout(0.5):  # no worker is started for them
        await pool.check(to_grammar(SONG))
        with pytest.raises(UnprocessableError):
            await pool.check(BOMB)


async def test_a_client_that_leaves_gets_nobody_its_answer(pool: GrammarPool) -> None:
    await pool.check(to_grammar({"type": "boolean"}))
    leaving = asyncio.create_task(pool.check(BOMB))
    await asyncio.sleep(0.3)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await pool.check(to_grammar(SONG))
