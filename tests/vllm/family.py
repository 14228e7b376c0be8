"""`make family`: every checkpoint of the family in a vLLM engine of its own, against Hugging Face.

Each is a tiny one of its architecture and limits. Clips of several lengths are asked alone and
together, and a song longer than the checkpoint hears is heard up to its limit.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adapter.audio import Song, cut
from adapter.checkpoint import Checkpoint, load_checkpoint
from adapter.engine import VllmEngine
from adapter.random_model import write_random_model
from adapter.request import SAMPLING_RATE
from adapter.settings import load_settings
from tests.family import FAMILY
from tests.reference import Reference, ReferenceAnswer
from tests.vllm.test_music_flamingo import MAX_NEW_TOKENS, PROMPT, ask, assert_same, forget, song

Samples = npt.NDArray[np.float32]

LENGTHS_SECONDS = (0.1, 12.3, 30.0, 31.0, 95.0)
PAST_THE_LIMIT_SECONDS = 7.3


@dataclass
class FamilyEngine:
    """A member of the family under vLLM and under Hugging Face."""

    checkpoint: Checkpoint
    llm: Any
    reference: Reference
    answers: dict[int | None, ReferenceAnswer] = field(default_factory=dict)

    def answer(self, samples: Samples | None) -> ReferenceAnswer:
        """The reference's answer, computed once for each length."""
        key = None if samples is None else len(samples)
        if key not in self.answers:
            self.answers[key] = self.reference.answer(samples, PROMPT, MAX_NEW_TOKENS)
        return self.answers[key]

    def heard(self, samples: Samples) -> Samples:
        """What the adapter lets the checkpoint hear of a song."""
        whole = Song(samples, len(samples) / SAMPLING_RATE, "digest", decode_seconds=0.0)
        clip = cut(
            whole,
            start_seconds=None,
            end_seconds=None,
            max_seconds=self.checkpoint.max_clip_seconds(),
            audible=self.checkpoint.audible_samples,
        )
        assert clip.truncated == (clip.heard_seconds < clip.duration_seconds)
        return clip.samples


@asynccontextmanager
async def family_engine(name: str, directory: Path) -> AsyncIterator[FamilyEngine]:
    """Write the checkpoint and start vLLM on it, with the adapter's own options, in float32."""
    write_random_model(directory, shape=FAMILY[name].shape)
    checkpoint = load_checkpoint(str(directory))
    settings = load_settings({"ADAPTER_MODEL": str(directory), "ADAPTER_DTYPE": "float32"})
    engine = await asyncio.to_thread(VllmEngine.start, settings, checkpoint)
    try:
        yield FamilyEngine(checkpoint, engine.llm, Reference(directory))
    finally:
        await engine.shutdown()


async def compare(member: FamilyEngine, songs: Sequence[Samples | None]) -> float:
    """Ask about each song alone, then about all at once, and return the worst difference of a
    log-probability. Raises AssertionError for an answer that is not the reference's."""
    await forget(member.llm)
    alone = [await ask(member.llm, member.reference, samples) for samples in songs]
    await forget(member.llm)
    together = await asyncio.gather(*(ask(member.llm, member.reference, s) for s in songs))
    pairs = list(zip([*alone, *together], [*songs, *songs], strict=True))
    return max(difference(output, member.answer(samples)) for output, samples in pairs)


async def compare_past_the_limit(member: FamilyEngine, seconds: float) -> float:
    """The same for a longer song than the checkpoint hears: Hugging Face cuts it by itself."""
    samples = song(seconds)
    await forget(member.llm)
    heard = member.heard(samples)
    assert len(heard) < len(samples)
    output = await ask(member.llm, member.reference, heard, uuid="past the limit")
    return difference(output, member.answer(samples))


def difference(output: Any, expected: ReferenceAnswer) -> float:
    """The worst difference of a log-probability among the tokens that rounding cannot change."""
    assert_same(output, expected)
    completion = output.outputs[0]
    steps = zip(completion.token_ids, completion.logprobs, expected.logprobs, strict=False)
    differences = [abs(step[token].logprob - logprob) for token, step, logprob in steps]
    return max(differences[: expected.decided()], default=0.0)


async def run(name: str, directory: Path) -> str:
    started = time.monotonic()
    limit_seconds = FAMILY[name].max_clip_seconds
    async with family_engine(name, directory) as member:
        worst = await compare(member, [None, *map(song, LENGTHS_SECONDS)])
        at_limit = await compare_past_the_limit(member, limit_seconds + PAST_THE_LIMIT_SECONDS)
        decided = sum(answer.decided() for answer in member.answers.values())
        tokens = sum(len(answer.token_ids) for answer in member.answers.values())
    return (
        f"{name:26} equal: {decided} of {tokens} tokens decided, worst log-probability difference "
        f"{worst:.1e}, {at_limit:.1e} at {limit_seconds} s ({time.monotonic() - started:.0f} s)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make family", description=__doc__)
    parser.add_argument("members", nargs="*", default=list(FAMILY), help=", ".join(FAMILY))
    names = parser.parse_args().members
    unknown = set(names) - set(FAMILY)
    if unknown:
        parser.error(f"no such member: {', '.join(unknown)}; expected some of {', '.join(FAMILY)}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            print(asyncio.run(run(name, Path(directory) / name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
