"""Log-mel features of a clip, made once on a thread of their own, however many prompts ask."""

import asyncio
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from adapter.errors import AdapterError
from adapter.request import SAMPLING_RATE, Clip
from adapter.torch_errors import as_adapter_error


@dataclass(frozen=True, slots=True, eq=False)
class AudioFeatures:
    """What the audio tower takes, float32 on the CPU, one window of 30 s a row.

    `input_features` is (num_windows, num_mel_bins, 3000); `input_features_mask` (num_windows, 3000)
    holds 1 where there is sound and 0 where the last window is padded.
    """

    input_features: torch.Tensor
    input_features_mask: torch.Tensor

    @property
    def num_embeddings(self) -> list[int]:
        """The embeddings of each window: a convolution of stride 2, then a mean over pairs."""
        frames = self.input_features_mask.sum(-1)
        return [int(n) for n in ((frames - 1) // 2 + 1) // 2]


class FeatureCache:
    """The features of the last few clips, each made once, also for those who ask meanwhile."""

    def __init__(self, feature_extractor: Any, max_clips: int) -> None:
        self._feature_extractor = feature_extractor
        self._max_clips = max_clips
        self._tasks: OrderedDict[str, asyncio.Future[AudioFeatures]] = OrderedDict()
        self._num_waiting: Counter[str] = Counter()
        # One thread: the spectrogram of a long song takes some hundred MB while it is made.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="features")

    async def get(self, clip: Clip) -> AudioFeatures:
        """Raises EngineError, or EngineOutOfMemoryError, where they cannot be made."""
        task = self._tasks.get(clip.uuid)
        if task is None:
            loop = asyncio.get_running_loop()
            task = loop.run_in_executor(self._thread, self._compute, clip)
            self._tasks[clip.uuid] = task
        self._tasks.move_to_end(clip.uuid)
        while len(self._tasks) > self._max_clips:
            self._tasks.popitem(last=False)
        self._num_waiting[clip.uuid] += 1
        try:
            return await asyncio.shield(task)  # others may wait for it after this one has left
        except AdapterError:
            self._tasks.pop(clip.uuid, None)
            raise
        finally:
            self._leave(clip.uuid, task)

    def _leave(self, uuid: str, task: "asyncio.Future[AudioFeatures]") -> None:
        """What nobody waits for any more is not begun."""
        self._num_waiting[uuid] -= 1
        if self._num_waiting[uuid]:
            return
        del self._num_waiting[uuid]
        if not task.done() and self._tasks.get(uuid, task) is task:
            task.cancel()
            self._tasks.pop(uuid, None)

    def shutdown(self) -> None:
        self._thread.shutdown(wait=False)
        self._tasks.clear()

    def _compute(self, clip: Clip) -> AudioFeatures:
        try:
            return extract_features(clip, self._feature_extractor)
        except Exception as error:
            failure = as_adapter_error(
                error, f"the features of {clip.heard_seconds:.0f} s of audio"
            )
        raise failure


def extract_features(clip: Clip, feature_extractor: Any) -> AudioFeatures:
    """Log-mel features in windows, as the processors of Music Flamingo make them."""
    window = int(feature_extractor.chunk_length * SAMPLING_RATE)
    samples = clip.samples
    chunks = [samples[start : start + window] for start in range(0, max(len(samples), 1), window)]
    made = feature_extractor(
        chunks,
        sampling_rate=SAMPLING_RATE,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="pt",
    )
    return AudioFeatures(made["input_features"], made["attention_mask"])
