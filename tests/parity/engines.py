"""Both engines of the adapter, made to tell the log-probabilities of what they chose.

They are the adapter's own classes; what is listened to lies behind them: vLLM's AsyncLLM, and the
transformers model.
"""

import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from adapter.checkpoint import Checkpoint
from adapter.engine import Engine, VllmEngine, engine_args
from adapter.row_steps import RowSteps
from adapter.settings import Settings
from adapter.transformers_engine import PreparedRequest, TransformersEngine

# A KV cache of 64 blocks of 32 tokens (vLLM keeps one more to itself).
SMALL_CACHE = {"num_gpu_blocks_override": 65, "block_size": 32}
SMALL_CONTEXT_TOKENS = 2048


@dataclass
class Heard:
    """One request, as the engine had it: its whole prompt, and a log-probability a token."""

    prompt_token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0


class ListeningEngine(Engine, Protocol):
    heard: dict[str, Heard]
    num_preemptions: int

    async def forget(self) -> None:
        """Empty every cache."""


class ListeningLlm:
    """An AsyncLLM that is asked for the log-probability of each chosen token."""

    def __init__(self, llm: Any, heard: dict[str, Heard]) -> None:
        self._llm = llm
        self._heard = heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(
        self, engine_input: Any, params: Any, request_id: str
    ) -> AsyncGenerator[Any, None]:
        params.logprobs = 0
        async with aclosing(self._llm.generate(engine_input, params, request_id)) as outputs:
            async for output in outputs:
                self._note(request_id, output)
                yield output

    def _note(self, request_id: str, output: Any) -> None:
        heard = self._heard.setdefault(request_id, Heard(list(output.prompt_token_ids)))
        heard.cached_tokens = output.num_cached_tokens or 0
        completion = output.outputs[0]
        steps = zip(completion.token_ids, completion.logprobs, strict=True)
        heard.logprobs += [step[token_id].logprob for token_id, step in steps]


class ListeningVllmEngine(VllmEngine):
    def __init__(self, llm: Any, stop_token_ids: Sequence[int]) -> None:
        self.heard: dict[str, Heard] = {}
        self.num_preemptions = 0
        super().__init__(ListeningLlm(llm, self.heard), stop_token_ids)

    @classmethod
    def launch(cls, checkpoint: Checkpoint, *, small_cache: bool = False) -> "ListeningVllmEngine":
        """Start vLLM with the adapter's own arguments, in float32; blocks for a minute."""
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = Settings(dtype="float32")
        if small_cache:
            settings = replace(settings, engine_args=SMALL_CACHE)
            checkpoint = replace(checkpoint, context_tokens=SMALL_CONTEXT_TOKENS)
        started: list[ListeningVllmEngine] = []

        def count(number: int) -> None:
            for engine in started:
                engine.num_preemptions += number

        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**engine_args(settings, checkpoint)),
            stat_loggers=[preemption_logger(count)],
        )
        started.append(cls(llm, checkpoint.eos_token_ids))
        return started[0]

    async def forget(self) -> None:
        self.heard.clear()
        await self.llm.reset_mm_cache()
        await self.llm.reset_encoder_cache()
        if not await self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: a request is still running")


def preemption_logger(count: Callable[[int], None]) -> Any:
    """A factory of vLLM's stat loggers, which passes on how many requests a step preempted."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Preemptions(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self,
            scheduler_stats: Any,  # noqa: ARG002
            iteration_stats: Any,
            mm_cache_stats: Any = None,  # noqa: ARG002
            engine_idx: int = 0,  # noqa: ARG002
        ) -> None:
            if iteration_stats is not None:
                count(iteration_stats.num_preempted_reqs)

        def log_engine_initialized(self) -> None:
            pass

    return Preemptions


class ListeningModel:
    """A transformers model that keeps the log-probabilities of its last `generate()`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.logprobs: list[list[float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **inputs: Any) -> torch.Tensor:
        output = self._model.generate(**inputs, return_dict_in_generate=True, output_logits=True)
        logprobs = torch.stack(output.logits, dim=1).log_softmax(-1)  # (rows, steps, vocab_size)
        chosen = output.sequences[:, -logprobs.shape[1] :]
        self.logprobs = logprobs.gather(2, chosen.unsqueeze(-1)).squeeze(-1).tolist()
        sequences: torch.Tensor = output.sequences
        return sequences


class ListeningTransformersEngine(TransformersEngine):
    num_preemptions = 0

    def __init__(self, checkpoint: Checkpoint, model: Any, feature_extractor: Any) -> None:
        self.heard: dict[str, Heard] = {}
        super().__init__(checkpoint, ListeningModel(model), feature_extractor)

    def _decode(
        self,
        prepared: Sequence[PreparedRequest],
        is_cancelled: Callable[[], bool],
        steps: RowSteps,
        *,
        share: bool,
    ) -> list[list[int]]:
        token_ids = super()._decode(prepared, is_cancelled, steps, share=share)
        for row, logprobs in zip(prepared, self._model.logprobs, strict=True):
            self.heard[row.request.request_id] = Heard(list(row.prompt_token_ids), logprobs)
        return token_ids

    async def forget(self) -> None:
        self.heard.clear()
        self._features._tasks.clear()
        self._prefix = None
