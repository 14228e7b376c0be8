"""The nouns that every layer shares: what a prompt asks of an engine, and what comes back."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

SAMPLING_RATE = 16_000  # Hz; what every checkpoint of the family hears

FinishReason = Literal["stop", "length", "repetition"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one answer is drawn; the names and meanings are the contract's."""

    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    do_sample: bool = False
    seed: int | None = None
    repetition_penalty: float = 1.0
    stop_on_repetition: bool = False
    grammar: str | None = None  # that the answer is held to: see `adapter.grammar`

    @property
    def greedy(self) -> bool:
        """True where no number is drawn: vLLM and Hugging Face both take the best token then."""
        return not self.do_sample or self.temperature == 0 or self.top_p == 0


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """The part of a song that one prompt hears.

    `samples` is float32 of shape (num_samples,), mono at 16 kHz, already cut to the moment and to
    what the checkpoint hears. `uuid` names the samples for the engine's caches: equal samples,
    equal uuid.
    """

    samples: npt.NDArray[np.float32]
    uuid: str
    duration_seconds: float
    start_seconds: float
    truncated: bool

    @property
    def heard_seconds(self) -> float:
        # Resampling rounds up to a whole sample; nobody hears more than there is.
        return min(len(self.samples) / SAMPLING_RATE, self.duration_seconds)


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """One prompt, ready for an engine.

    `prompt_token_ids` holds the audio's placeholder once where there is a clip; an engine widens it
    to `num_audio_tokens` (and the boundary tokens, where the checkpoint has them). Only requests of
    one `cache_salt` share what an engine caches. With `stream` somebody wants each step's tokens as
    they come; without, an engine may keep them to the end.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    clip: Clip | None
    num_audio_tokens: int
    sampling: Sampling
    cache_salt: str | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What an engine says of one request: the token ids since its last word, and how it ended.

    `prompt_tokens` counts the widened prompt; `cached_tokens` the part of it that was not computed
    anew. The last output of a request has a `finish_reason`; the end-of-turn token counts among the
    `token_ids`. With `starts_over` what was said of the request before does not count.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    starts_over: bool = False
