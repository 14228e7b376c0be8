"""One vLLM engine for all tests that need one: it takes a minute to start.

Every test in this directory is marked `vllm`, and the asynchronous ones run in the session's event
loop, where the engine lives.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from adapter.checkpoint import load_checkpoint
from adapter.engine import VllmEngine

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.vllm)
        if inspect.iscoroutinefunction(getattr(item, "function", None)):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def async_llm(random_model: Path) -> AsyncIterator[Any]:
    """vLLM's AsyncLLM on the demo checkpoint in float32, with the adapter's own options."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        environment.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(
            model=str(random_model),
            dtype="float32",
            max_model_len=32_768,
            enforce_eager=True,
            enable_prefix_caching=True,
            limit_mm_per_prompt={"audio": 1},
            generation_config="vllm",
            disable_log_stats=False,
        )
        llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
        yield llm
        await asyncio.to_thread(llm.shutdown)


@pytest.fixture(scope="session")
def vllm_engine(async_llm: Any, random_model: Path) -> VllmEngine:
    """The adapter's engine around the shared AsyncLLM; never shut it down in a test."""
    return VllmEngine(async_llm, load_checkpoint(str(random_model)).eos_token_ids)
