"""An answer that is held to a grammar has the same tokens on both engines."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from adapter.engine import VllmEngine
from adapter.grammar import to_grammar
from tests.test_grammar import SONG, TEXT
from tests.test_transformers_engine import PROMPTS, SONGS, Bench
from tests.vllm.test_sampling import answer

LIST = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 4}
SCHEMAS = [SONG, LIST, {"type": "number", "minimum": 0, "maximum": 200}]


@pytest.fixture(scope="module")
def bench(random_model: Path) -> Iterator[Bench]:
    bench = Bench(random_model)
    yield bench
    asyncio.run(bench.engine.shutdown())


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("samples", [None, SONGS[3]], ids=["text", "audio"])
async def test_greedy_answers_have_the_same_tokens_on_both(
    vllm_engine: VllmEngine, bench: Bench, samples: object, penalty: float
) -> None:
    """On transformers the rows of one call, each with another schema and one with none."""
    requests = [
        bench.request(
            prompt,
            samples,
            name=str(index),
            max_new_tokens=96,
            repetition_penalty=penalty,
            grammar=None if schema is None else to_grammar(schema),
        )
        for index, (prompt, schema) in enumerate(zip(PROMPTS, [*SCHEMAS, None, LIST], strict=True))
    ]
    on_transformers = await bench.answer(*requests)
    on_vllm = await asyncio.gather(*(answer(vllm_engine, request) for request in requests))
    for row, other, schema in zip(on_transformers, on_vllm, [*SCHEMAS, None, LIST], strict=True):
        assert row.token_ids == other.token_ids
        assert row.finish_reason == other.finish_reason
        if schema is not None and row.finish_reason == "stop":
            jsonschema.validate(json.loads(bench.prompter.decode_all(row.token_ids)), schema)
    assert [row.finish_reason for row in on_transformers].count("stop") >= 3
