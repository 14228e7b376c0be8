"""The engine without vLLM: transformers' own `generate()`, the rows of a call padded on the left.

A song is turned into features once. Where the rows of a call hear one song, everything up to its
end is computed for one row and repeated for the others, and kept for the next call.
All torch work of a call happens on one thread, so the event loop stays free and calls queue.
"""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import Cache, GenerationConfig, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutputWithPooling

from adapter.errors import (
    EngineDeadError,
    EngineOutOfMemoryError,
    SettingsError,
    UnprocessableError,
)
from adapter.features import AudioFeatures, FeatureCache
from adapter.grammar_compiler import GrammarCompiler
from adapter.request import EngineOutput, EngineRequest, Sampling
from adapter.row_steps import Row, RowSteps
from adapter.sampling import (
    EndRows,
    HoldToGrammars,
    build_generation_config,
    build_logits_processors,
    cut_answer,
)
from adapter.song_prefix import SongPrefix, rows_cache, use_song_prefixes
from adapter.torch_errors import as_adapter_error, free_memory, is_context_lost

if TYPE_CHECKING:
    from adapter.checkpoint import Checkpoint
    from adapter.engine import EngineName

MAX_CACHED_CLIPS = 4  # 61 MB of features for a song of 20 minutes
WINDOWS_PER_SLICE = 8  # of 30 s: the most that the audio tower holds in memory at a time
DTYPES = ("auto", "float32", "bfloat16", "float16")
# transformers (5.19) knows the other namings of the weights, but not the uploads' with `model.` in
# front: it finds all of them but this one.
KEY_MAPPING = {r"^model\.language_model\.lm_head": "lm_head"}


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """A request with its prompt widened to one placeholder for each embedding of its audio."""

    request: EngineRequest
    prompt_token_ids: tuple[int, ...]
    features: AudioFeatures | None
    grammar: Any = None  # an xgrammar.CompiledGrammar, or None for any text

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling


class TransformersEngine:
    """A checkpoint under transformers: a static batch, one `generate()` call at a time."""

    name: "EngineName" = "transformers"
    continuous = False

    def __init__(self, checkpoint: "Checkpoint", model: Any, feature_extractor: Any) -> None:
        self._checkpoint = checkpoint
        self._model = model
        self._encodes_with_ids = (
            "input_ids" in inspect.signature(model.get_audio_features).parameters
        )
        self._features = FeatureCache(feature_extractor, MAX_CACHED_CLIPS)
        self._grammars = GrammarCompiler(checkpoint.path, checkpoint.vocab_size)
        self._prefix: SongPrefix | None = None  # of the song that was heard last
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generate")
        self._closing = threading.Event()
        self._progress_at = 0.0
        self._dead = False

    @classmethod
    def load(
        cls, checkpoint: "Checkpoint", *, dtype: str, device: str | None = None
    ) -> "TransformersEngine":
        """Load the weights (blocks while it does) onto `device`, or CUDA where there is one.

        `dtype` "auto" is the checkpoint's on CUDA and float32 on the CPU, where few processors
        multiply bfloat16 faster and none gains answers from it. Raises SettingsError for a dtype
        that is none of `DTYPES`, a device that cannot run the checkpoint, and a checkpoint that
        lacks weights.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model_class = getattr(transformers, checkpoint.architecture)
        _check_device(device, model_class)
        model, loading = model_class.from_pretrained(
            checkpoint.path,
            dtype=_resolve_dtype(dtype, device),
            output_loading_info=True,
            key_mapping=KEY_MAPPING,
        )
        _check_complete(checkpoint.path, loading)
        slice_windows(model.model.audio_tower)
        use_song_prefixes(model.model.language_model)
        # What `generate()` falls back on; a sampling value nobody asked for must not stand there.
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        # Its reminder takes the length of the time axis (1200 s) for the context of the model.
        logging.getLogger("transformers.generation.stopping_criteria").setLevel(logging.ERROR)
        processor = transformers.AutoProcessor.from_pretrained(checkpoint.path)  # type: ignore[no-untyped-call]
        return cls(checkpoint, model.to(device).eval(), processor.feature_extractor)

    async def prepare(self, request: EngineRequest) -> PreparedRequest:
        """Make the features of the clip, or wait for those that another prompt has begun.

        Raises UnprocessableError where the audio gives another number of embeddings than the
        prompt has placeholders: torch would read past a tensor's end on the GPU and lose it.
        """
        self._check_alive()
        prompt_token_ids = self._checkpoint.widen(
            request.prompt_token_ids, request.num_audio_tokens
        )
        features = None if request.clip is None else await self._features.get(request.clip)
        grammar = None
        if request.sampling.grammar is not None:
            grammar = await asyncio.to_thread(self._grammars.compile, request.sampling.grammar)
        prepared = PreparedRequest(request, tuple(prompt_token_ids), features, grammar)
        _check_placeholders(prepared, self._checkpoint.audio_token_id)
        return prepared

    async def generate(
        self, prepared: Sequence[PreparedRequest]
    ) -> AsyncGenerator[EngineOutput, None]:
        """One `generate()` call: an output for each row, in order, once all have ended, and before
        that one for each token of a row that is streamed.

        Raises ValueError for rows that cannot share a call: it draws all of them with one
        temperature, top_p and repetition_penalty, and all or none of them hear audio.
        """
        self._check_alive()
        _check_shared(prepared)
        left = threading.Event()

        def is_cancelled() -> bool:  # asked at each step
            self._progress_at = time.monotonic()
            return left.is_set() or self._closing.is_set()

        steps = self._row_steps(prepared)
        call = self._worker.submit(self._answer, tuple(prepared), is_cancelled, steps)
        answered = asyncio.wrap_future(call)
        answered.add_done_callback(lambda _: steps.finish())
        try:
            while (said := await steps.next()) is not None:
                for output in said:
                    yield output
        finally:
            left.set()
            await _settled(answered)
        for output in answered.result():
            yield output

    async def check_health(self) -> None:
        self._check_alive()

    def last_progress_at(self) -> float:
        return self._progress_at

    def kill(self) -> bool:
        return False  # a thread of this process: it ends with it

    async def shutdown(self) -> None:
        """Stop the call that runs within its step, end the threads and free the model."""
        self._closing.set()
        self._features.shutdown()
        await asyncio.to_thread(self._worker.shutdown)
        self._model = self._prefix = None
        free_memory()

    def _check_alive(self) -> None:
        if self._closing.is_set():
            raise EngineDeadError("the engine was shut down; send the prompt again later")
        if self._dead:
            raise EngineDeadError("the GPU's context is lost; the engine must be started anew")

    def _row_steps(self, prepared: Sequence[PreparedRequest]) -> RowSteps:
        rows = [
            Row(one.request.request_id, len(one.prompt_token_ids), one.request.stream)
            for one in prepared
        ]
        return RowSteps(rows, self._checkpoint.eos_token_ids)

    def _answer(
        self,
        prepared: Sequence[PreparedRequest],
        is_cancelled: Callable[[], bool],
        steps: RowSteps,
    ) -> list[EngineOutput]:
        """The whole of a call, on the worker's thread; whatever goes wrong is an EngineError."""
        try:
            return self._try(prepared, is_cancelled, steps, share=hear_one_song(prepared))
        except EngineOutOfMemoryError:
            had_prefix, self._prefix = self._prefix is not None, None
            free_memory()
            if not had_prefix or len(prepared) > 1:  # several rows are tried again as fewer
                raise
        return self._try(prepared, is_cancelled, steps, share=False)

    def _try(
        self,
        prepared: Sequence[PreparedRequest],
        is_cancelled: Callable[[], bool],
        steps: RowSteps,
        *,
        share: bool,
    ) -> list[EngineOutput]:
        try:
            with torch.inference_mode():
                cached = self._num_cached(prepared) if share else [0] * len(prepared)
                steps.start(cached)
                sequences = self._decode(prepared, is_cancelled, steps, share=share)
            return [
                self._output(row, ids, cached[index], steps.num_told(index))
                for index, (row, ids) in enumerate(zip(prepared, sequences, strict=True))
            ]
        except Exception as error:
            self._dead = self._dead or is_context_lost(error)
            failure = as_adapter_error(error, f"generate() on {len(prepared)} prompts")
        raise failure

    def _decode(
        self,
        prepared: Sequence[PreparedRequest],
        is_cancelled: Callable[[], bool],
        steps: RowSteps,
        *,
        share: bool,
    ) -> list[list[int]]:
        """The token ids of each row after its prompt, padding behind a row's end included.

        `share`: the rows hear one song, and are computed from its end on.
        """
        _check_not_cancelled(is_cancelled)
        device = self._model.device
        samplings = [row.sampling for row in prepared]
        prefix = self._song_prefix(prepared[0], is_cancelled) if share else None
        num_shared = len(prefix.token_ids) if prefix else 0
        input_ids, attention_mask = pad(
            [row.prompt_token_ids for row in prepared], device, num_shared=num_shared
        )
        prompt_length = input_ids.shape[1]
        told = steps if any(row.request.stream for row in prepared) else None
        end_rows = EndRows(samplings, prompt_length, device, is_cancelled, told)
        with self._sharing(prefix):
            sequences = self._model.generate(
                input_ids=input_ids,
                inputs_embeds=None if prefix else self._embed(prepared, input_ids, is_cancelled),
                past_key_values=self._new_cache(num_shared),
                attention_mask=attention_mask,
                generation_config=build_generation_config(
                    samplings, self._checkpoint.eos_token_ids, self._checkpoint.pad_token_id
                ),
                logits_processor=build_logits_processors(
                    samplings, device, self._hold_to_grammars(prepared)
                ),
                stopping_criteria=StoppingCriteriaList([end_rows]),
            )
        _check_not_cancelled(is_cancelled)
        token_ids: list[list[int]] = sequences[:, prompt_length:].tolist()
        return token_ids

    def _hold_to_grammars(self, prepared: Sequence[PreparedRequest]) -> HoldToGrammars | None:
        grammars = [row.grammar for row in prepared]
        if not any(grammars):
            return None
        return HoldToGrammars(grammars, self._checkpoint.eos_token_ids)

    def _num_cached(self, prepared: Sequence[PreparedRequest]) -> list[int]:
        """The tokens of each row that are not computed for it: the first row pays for the rest."""
        token_ids = self._up_to_song_end(prepared[0])
        known = is_prefix_of(self._prefix, prepared[0], token_ids)
        return [len(token_ids) if known or index else 0 for index in range(len(prepared))]

    def _song_prefix(self, row: PreparedRequest, is_cancelled: Callable[[], bool]) -> SongPrefix:
        """The keys and values up to the end of the row's song, computed where it is a new one."""
        assert row.request.clip is not None
        token_ids = self._up_to_song_end(row)
        if self._prefix is not None and is_prefix_of(self._prefix, row, token_ids):
            return self._prefix
        self._prefix = None  # before another one takes memory
        input_ids = torch.tensor([token_ids], device=self._model.device)
        cache = self._new_cache()
        self._model.model.language_model(
            inputs_embeds=self._embed([row], input_ids, is_cancelled),
            past_key_values=cache,
            use_cache=True,
        )
        self._prefix = SongPrefix.of(row.request.clip.uuid, token_ids, cache)
        return self._prefix

    def _up_to_song_end(self, row: PreparedRequest) -> tuple[int, ...]:
        backwards = row.prompt_token_ids[::-1].index(self._checkpoint.audio_token_id)
        return row.prompt_token_ids[: len(row.prompt_token_ids) - backwards]

    def _new_cache(self, prefix_length: int = 0) -> Cache:
        num_layers = self._model.config.get_text_config().num_hidden_layers
        return rows_cache(num_layers, prefix_length)

    def _sharing(self, prefix: SongPrefix | None) -> AbstractContextManager[None]:
        return prefix.shared_by(self._model.model.language_model) if prefix else nullcontext()

    def _embed(
        self,
        prepared: Sequence[PreparedRequest],
        input_ids: torch.Tensor,
        is_cancelled: Callable[[], bool],
    ) -> torch.Tensor | None:
        """The prompts' embeddings (rows, length, hidden_size), each clip encoded once.

        None for prompts without audio. `generate()` itself would encode a clip for every row.
        """
        if prepared[0].features is None:
            return None
        inputs_embeds: torch.Tensor = self._model.get_input_embeddings()(input_ids)
        placeholders = input_ids == self._checkpoint.audio_token_id
        encoded: dict[str, torch.Tensor] = {}
        for index, row in enumerate(prepared):
            assert row.request.clip is not None
            uuid = row.request.clip.uuid
            if uuid not in encoded:
                _check_not_cancelled(is_cancelled)
                encoded[uuid] = self._encode(row)
            inputs_embeds[index, placeholders[index]] = encoded[uuid].to(inputs_embeds.dtype)
        return inputs_embeds

    def _encode(self, row: PreparedRequest) -> torch.Tensor:
        """The embeddings (num_audio_tokens, hidden_size) of a row's clip.

        A Music Flamingo finds the place of each window in its song from the row's token ids.
        """
        assert row.features is not None
        model = self._model
        inputs = {
            # The processor makes float32, which a model in bfloat16 refuses.
            "input_features": row.features.input_features.to(model.device, model.dtype),
            "input_features_mask": row.features.input_features_mask.to(model.device),
        }
        if self._encodes_with_ids:
            inputs["input_ids"] = torch.tensor([row.prompt_token_ids], device=model.device)
        embeddings: torch.Tensor = model.get_audio_features(
            **inputs, return_dict=True
        ).pooler_output
        return embeddings

    def _output(
        self, row: PreparedRequest, token_ids: Sequence[int], cached_tokens: int, num_told: int
    ) -> EngineOutput:
        answer, finish_reason = cut_answer(token_ids, row.sampling, self._checkpoint.eos_token_ids)
        return EngineOutput(
            request_id=row.request.request_id,
            token_ids=answer[num_told:],
            finish_reason=finish_reason,
            prompt_tokens=len(row.prompt_token_ids),
            cached_tokens=cached_tokens,
        )


def slice_windows(audio_tower: Any) -> None:
    """Make the tower encode a song in slices of windows, with the same result.

    A window is encoded by itself, so that nothing else changes: the attention scores of a long
    song's windows are never all in memory. What comes after the tower sees the whole song, whose
    time embedding depends on each window's place in it.
    """
    encode = audio_tower.forward

    def forward(
        input_features: torch.Tensor, input_features_mask: torch.Tensor, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        features = torch.split(input_features, WINDOWS_PER_SLICE)
        masks = torch.split(input_features_mask, WINDOWS_PER_SLICE)
        slices = [
            encode(windows, input_features_mask=mask, **kwargs).last_hidden_state
            for windows, mask in zip(features, masks, strict=True)
        ]
        return BaseModelOutputWithPooling(last_hidden_state=torch.cat(slices))  # type: ignore[arg-type]

    audio_tower.forward = forward


def hear_one_song(prepared: Sequence[PreparedRequest]) -> bool:
    clips = [row.request.clip for row in prepared]
    return None not in clips and len({clip.uuid for clip in clips if clip}) == 1


def is_prefix_of(
    prefix: SongPrefix | None, row: PreparedRequest, token_ids: tuple[int, ...]
) -> bool:
    if prefix is None or row.request.clip is None:
        return False
    return prefix.uuid == row.request.clip.uuid and prefix.token_ids == token_ids


def pad(
    rows: Sequence[Sequence[int]], device: torch.device | str, *, num_shared: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask of shape (rows, longest row), padded on the left or, where the
    first `num_shared` tokens of all rows are computed already, behind those.

    A row is padded with its own first token rather than the padding token: `generate()` counts
    whatever stands in the ids for the repetition penalty, and so nothing but the prompt counts.
    """
    length = max(len(row) for row in rows)
    ids, mask = [], []
    for row in rows:
        gap = length - len(row)
        ids.append([*row[:num_shared], *[row[0]] * gap, *row[num_shared:]])
        mask.append([1] * num_shared + [0] * gap + [1] * (len(row) - num_shared))
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _resolve_dtype(dtype: str, device: str) -> torch.dtype | str:
    if dtype not in DTYPES:
        raise SettingsError(f"ADAPTER_DTYPE={dtype}: expected one of {', '.join(DTYPES)}")
    if dtype == "auto":
        return torch.float32 if device == "cpu" else "auto"
    resolved: torch.dtype = getattr(torch, dtype)
    return resolved


def _check_device(device: str, model_class: Any) -> None:
    """transformers turns a Music Flamingo's embeddings by their time in float64, and would say so
    only at the first song."""
    turns = "input_ids" in inspect.signature(model_class.get_audio_features).parameters
    if turns and device.partition(":")[0] == "mps":
        raise SettingsError(
            f"the device is {device}, which has no float64, and Music Flamingo's time embedding "
            "needs it: expected a CUDA device or the CPU; an Audio Flamingo 3 runs on this one"
        )


def _check_complete(path: object, loading: dict[str, Any]) -> None:
    """transformers fills missing weights with random numbers and only warns."""
    lacking = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
    if lacking:
        raise SettingsError(
            f"ADAPTER_MODEL={path}: expected a whole checkpoint, but {len(lacking)} weights are "
            f"missing or of another shape, the first being {lacking[0]}"
        )


def _check_placeholders(prepared: PreparedRequest, audio_token_id: int) -> None:
    placeholders = prepared.prompt_token_ids.count(audio_token_id)
    windows = [] if prepared.features is None else prepared.features.num_embeddings
    if placeholders != sum(windows):
        raise UnprocessableError(
            f"the prompt has {placeholders} audio tokens and the audio gives {sum(windows)}; "
            "send another part of the song"
        )
    if 0 in windows:
        raise UnprocessableError(
            "the audio ends less than 20 ms into its last window of 30 s, which gives no audio "
            "token; send a slightly shorter or longer part"
        )


def _check_shared(prepared: Sequence[PreparedRequest]) -> None:
    keys = {(_sampling_key(row.sampling), row.features is not None) for row in prepared}
    if len(keys) != 1:
        raise ValueError(
            f"the rows of a call must share do_sample, temperature, top_p, repetition_penalty and "
            f"whether they hear audio; got {len(keys)} kinds among {len(prepared)} rows"
        )


def _sampling_key(sampling: Sampling) -> tuple[float, ...]:
    drawn = () if sampling.greedy else (sampling.temperature, sampling.top_p)
    return (sampling.repetition_penalty, *drawn)


def _check_not_cancelled(is_cancelled: Callable[[], bool]) -> None:
    if is_cancelled():
        raise EngineDeadError("the engine was shut down before the answer; send the prompt again")


async def _settled(future: asyncio.Future[Any]) -> None:
    """Wait until the thread is done, however often the waiting task is cancelled meanwhile."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    future.exception()  # taken note of: nobody may be left to ask for it
