"""vLLM's AsyncLLM called directly: what the adapter's path costs on top shows against this.

The engine's options and the prompts' token ids are the adapter's; the requests are vLLM's own.
"""

import asyncio
import os
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.adapter_server import make_settings
from benchmarks.memory import find_peak_bytes
from benchmarks.workload import (
    WARM_UP_PROMPT,
    Answer,
    Outcome,
    Report,
    Run,
    SongState,
    Workload,
    find_device,
    read_song,
)

if TYPE_CHECKING:
    from adapter.checkpoint import Checkpoint


def run(workload: Workload, report: Report) -> Outcome:
    """Each song new, then once more with its prefix cached."""
    return asyncio.run(_run(workload, report))


async def _run(workload: Workload, report: Report) -> Outcome:
    settings = make_settings(workload, "vllm")
    device = find_device()
    report(0, "starting")
    started = time.perf_counter()
    engine = await asyncio.to_thread(Engine.start, settings)
    start_seconds = time.perf_counter() - started
    try:
        await engine.answer(read_song(workload.warm_up_song), "warm-up", WARM_UP_PROMPT, 4)
        runs = [
            await _run_round(engine, workload, round_index, state, report)
            for round_index in range(len(workload.rounds))
            for state in ("new", "known")
        ]
        peak_bytes = await asyncio.to_thread(find_peak_bytes, os.getpid())
    finally:
        await asyncio.to_thread(engine.llm.shutdown)
    return Outcome(tuple(runs), device, start_seconds, peak_bytes, settings)


async def _run_round(
    engine: "Engine", workload: Workload, round_index: int, state: SongState, report: Report
) -> Run:
    report(0, f"answering, song {state}")
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(_ask(engine, workload, song) for song in workload.rounds[round_index])
    )
    wall_seconds = time.perf_counter() - started
    report(workload.num_prompts_a_round, f"answering, song {state}")
    return Run(round_index, state, wall_seconds, tuple(chain(*answers)))


async def _ask(engine: "Engine", workload: Workload, song: Path) -> list[Answer]:
    """Decode a song, once, and ask all prompts about it at once."""
    samples = await asyncio.to_thread(read_song, song)
    return await asyncio.gather(
        *(
            engine.answer(samples, song.name, prompt, workload.max_new_tokens)
            for prompt in workload.prompts
        )
    )


class Engine:
    """An AsyncLLM, asked as vLLM's own users do, with the adapter's token ids."""

    def __init__(self, llm: Any, checkpoint: "Checkpoint") -> None:
        from adapter.prompting import Prompter

        self.llm = llm
        self.prompter = Prompter(checkpoint)
        self.stop_token_ids = list(checkpoint.eos_token_ids)
        self.num_requests = 0

    @classmethod
    def start(cls, settings: dict[str, str]) -> "Engine":
        """With the options that the adapter would give it under `settings`."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from adapter.checkpoint import load_checkpoint
        from adapter.engine import engine_args
        from adapter.settings import load_settings

        loaded = load_settings(settings)
        checkpoint = load_checkpoint(
            loaded.model, loaded.revision, max_model_len=loaded.max_model_len
        )
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args(loaded, checkpoint)))
        return cls(llm, checkpoint)

    async def answer(self, samples: Any, uuid: str, prompt: str, max_new_tokens: int) -> Answer:
        async for output in self._generate(samples, uuid, prompt, max_new_tokens, "FINAL_ONLY"):
            completion = output.outputs[0]
        token_ids = tuple(completion.token_ids)
        return Answer(completion.text, len(token_ids), token_ids)

    async def first_token_at(
        self, samples: Any, uuid: str, prompt: str, max_new_tokens: int
    ) -> float:
        """The `perf_counter` second of the first token of an answer that is made to its end."""
        first = None
        async for _ in self._generate(samples, uuid, prompt, max_new_tokens, "DELTA"):
            first = first or time.perf_counter()
        assert first is not None
        return first

    def _generate(
        self, samples: Any, uuid: str, prompt: str, max_new_tokens: int, output_kind: str
    ) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.num_requests += 1
        request = {
            "prompt_token_ids": list(self.prompter.encode(prompt, with_audio=True)),
            "multi_modal_data": {"audio": [(samples, 16_000)]},
            "multi_modal_uuids": {"audio": [uuid]},
        }
        params = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=0.0,
            stop_token_ids=self.stop_token_ids,
            output_kind=RequestOutputKind[output_kind],
        )
        return self.llm.generate(request, params, f"bench-{self.num_requests}")
