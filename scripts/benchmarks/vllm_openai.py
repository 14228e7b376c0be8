"""vLLM's own OpenAI server with our plugin: what its users would have without the adapter.

The engine's options are the adapter's; each prompt is a chat call of its own with the song as
base64, all at once.
"""

import asyncio
import base64
import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.adapter_server import make_settings, running_server
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
)

# What `vllm serve` runs; that command itself asks for a package named `vllm`, and the CPU build has
# another name.
SERVER = (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry")
NAME = "bench"


def run(workload: Workload, report: Report) -> Outcome:
    """Each song new, then once more with its prefix cached."""
    settings = make_settings(workload, "vllm")
    device = find_device()
    report(0, "starting")
    args, stop_token_ids = make_engine_args(settings)
    started = time.perf_counter()
    with running_server({}, [*SERVER, "--served-model-name", NAME, *make_flags(args)]) as server:
        start_seconds = time.perf_counter() - started
        runs = asyncio.run(_run(server.url, workload, stop_token_ids, report))
        peak_bytes = find_peak_bytes(server.process.pid)
    return Outcome(tuple(runs), device, start_seconds, peak_bytes, settings)


def make_engine_args(settings: Mapping[str, str]) -> tuple[dict[str, Any], list[int]]:
    """The arguments that the adapter would give vLLM's engine under `settings`, and the ids that
    end an answer."""
    from adapter.checkpoint import load_checkpoint
    from adapter.engine import engine_args
    from adapter.settings import load_settings

    loaded = load_settings(settings)
    checkpoint = load_checkpoint(loaded.model, loaded.revision, max_model_len=loaded.max_model_len)
    return engine_args(loaded, checkpoint), list(checkpoint.eos_token_ids)


def make_flags(args: Mapping[str, Any]) -> list[str]:
    """Arguments of the engine as flags of vLLM's command line.

    What is vLLM's default is left out: not every switch can be said to be off.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    defaults = {field.name: field.default for field in dataclasses.fields(AsyncEngineArgs)}
    flags: list[str] = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        if value == defaults[name]:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


async def _run(
    url: str, workload: Workload, stop_token_ids: list[int], report: Report
) -> list[Run]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=86_400, max_retries=0
    ) as client:
        chat = Chat(client, stop_token_ids)
        await chat.answer(*encode(workload.warm_up_song), WARM_UP_PROMPT, 4)
        return [
            await _run_round(chat, workload, round_index, state, report)
            for round_index in range(len(workload.rounds))
            for state in ("new", "known")
        ]


async def _run_round(
    chat: "Chat", workload: Workload, round_index: int, state: SongState, report: Report
) -> Run:
    report(0, f"answering, song {state}")
    started = time.perf_counter()
    songs = [encode(song) for song in workload.rounds[round_index]]
    answers = await asyncio.gather(
        *(
            chat.answer(*song, prompt, workload.max_new_tokens)
            for song in songs
            for prompt in workload.prompts
        )
    )
    wall_seconds = time.perf_counter() - started
    report(workload.num_prompts_a_round, f"answering, song {state}")
    return Run(round_index, state, wall_seconds, tuple(answers))


def encode(song: Path) -> tuple[str, str]:
    """A song as base64, and its format."""
    return base64.b64encode(song.read_bytes()).decode(), song.suffix[1:]


class Chat:
    """`/v1/chat/completions`, greedy."""

    def __init__(self, client: Any, stop_token_ids: list[int]) -> None:
        self.client = client
        self.stop_token_ids = stop_token_ids

    async def answer(self, data: str, form: str, prompt: str, max_new_tokens: int) -> Answer:
        content = [
            {"type": "input_audio", "input_audio": {"data": data, "format": form}},
            {"type": "text", "text": prompt},
        ]
        completion = await self.client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=max_new_tokens,
            extra_body={"stop_token_ids": self.stop_token_ids},
        )
        text = completion.choices[0].message.content or ""
        return Answer(text, completion.usage.completion_tokens)
