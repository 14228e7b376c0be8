"""Hugging Face alone: transformers' own processor and `generate()`; nothing of the adapter.

Every prompt is its own mel spectrogram, encoder pass and prefill, since the processor takes one
audio for each text.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.memory import find_peak_bytes
from benchmarks.workload import (
    WARM_UP_PROMPT,
    Answer,
    Outcome,
    Report,
    Run,
    Workload,
    find_device,
    read_song,
)


def run_sequential(workload: Workload, report: Report) -> Outcome:
    """One prompt at a time."""
    return _run(workload, 1, report)


def run_groups(workload: Workload, report: Report) -> Outcome:
    """Groups of prompts in one call, padded on the left by the processor."""
    return _run(workload, workload.hf_group_size, report)


def _run(workload: Workload, group_size: int, report: Report) -> Outcome:
    started = time.perf_counter()
    report(0, "loading")
    model = HuggingFace(workload.model, workload.revision, workload.dtype, find_device())
    start_seconds = time.perf_counter() - started
    model.answer(read_song(workload.warm_up_song), [WARM_UP_PROMPT], max_new_tokens=4)
    runs = [
        _run_round(model, workload, round_index, group_size, report)
        for round_index in range(len(workload.rounds))
    ]
    return Outcome(tuple(runs), model.device, start_seconds, find_peak_bytes(os.getpid()))


def _run_round(
    model: "HuggingFace", workload: Workload, round_index: int, group_size: int, report: Report
) -> Run:
    """One song after the other: there is no way to have them all at once."""
    report(0, "answering")
    answers: list[Answer] = []
    started = time.perf_counter()
    for song in workload.rounds[round_index]:
        samples = read_song(song)
        for group in cut(workload.prompts, group_size):
            answers += model.answer(samples, group, workload.max_new_tokens)
            report(len(group), "answering")
    return Run(round_index, "new", time.perf_counter() - started, tuple(answers))


class HuggingFace:
    """A checkpoint under transformers, greedy."""

    def __init__(self, model: str, revision: str, dtype: str, device: str) -> None:
        import torch
        import transformers

        architecture = transformers.AutoConfig.from_pretrained(
            model, revision=revision
        ).architectures[0]
        model_class = getattr(transformers, architecture)
        self.device = device
        self.processor: Any = transformers.AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            model, revision=revision
        )
        self.model: Any = model_class.from_pretrained(
            model, revision=revision, dtype=getattr(torch, dtype)
        )
        self.model = self.model.to(device).eval()
        eos_token_id = self.model.generation_config.eos_token_id
        if eos_token_id is None:
            eos_token_id = self.processor.tokenizer.eos_token_id
        # Only the ids that end an answer: no sampling value of generation_config.json.
        self.model.generation_config = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
            eos_token_id=eos_token_id, pad_token_id=self.processor.tokenizer.pad_token_id
        )
        self.eos_token_ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]

    def answer(
        self, samples: npt.NDArray[np.float32], prompts: Sequence[str], max_new_tokens: int
    ) -> list[Answer]:
        """The greedy answers to prompts about one song, in one call of `generate()`."""
        texts = [self._render(samples, prompt) for prompt in prompts]
        inputs = self.processor(text=texts, audio=[samples] * len(texts))
        inputs = inputs.to(self.device, self.model.dtype)
        output = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        rows = output[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._answer(row) for row in rows]

    def _render(self, samples: npt.NDArray[np.float32], prompt: str) -> str:
        content = [{"type": "audio", "audio": samples}, {"type": "text", "text": prompt}]
        conversation = [{"role": "user", "content": content}]
        return str(
            self.processor.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        )

    def _answer(self, row: Sequence[int]) -> Answer:
        """A row up to its end-of-turn token; padding stands behind it."""
        ends = [index for index, token in enumerate(row) if token in self.eos_token_ids]
        token_ids = tuple(row[: ends[0] + 1] if ends else row)
        text = self.processor.tokenizer.decode(token_ids, skip_special_tokens=True)
        return Answer(text, len(token_ids), token_ids)


def cut(prompts: Sequence[str], size: int) -> list[Sequence[str]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]
