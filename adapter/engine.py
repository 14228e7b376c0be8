"""The engine behind the adapter: the protocol, the choice of engine, and vLLM's."""

import asyncio
import atexit
import dataclasses
import difflib
import importlib.util
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from adapter.errors import EngineDeadError, EngineError, SettingsError, UnprocessableError
from adapter.repetition import MAX_PATTERN_TOKENS, MIN_REPEATS
from adapter.request import SAMPLING_RATE, EngineOutput, EngineRequest, FinishReason, Sampling

if TYPE_CHECKING:
    from adapter.checkpoint import Checkpoint
    from adapter.settings import Settings

logger = logging.getLogger(__name__)

EngineName = Literal["vllm", "transformers"]


class Engine(Protocol):
    """What the adapter asks of an engine.

    `prepare` is the unbilled part (features are made, off the event loop); its result goes to
    `generate` as it is. `generate` is the billed part: it starts at the call's first step and ends
    with the last output. Closing its iterator stops the work within the engine's current step.
    """

    name: EngineName
    continuous: bool  # True: every request is a call of its own and the engine batches them

    async def prepare(self, request: EngineRequest) -> Any:
        """Make what `generate` takes. Raises UnprocessableError where the input is at fault."""

    def generate(self, prepared: Sequence[Any]) -> AsyncGenerator[EngineOutput, None]:
        """Answer the requests of one call, which share their sampling unless there is just one.

        Raises EngineOutOfMemoryError, EngineDeadError, or EngineError for the whole call.
        """

    async def check_health(self) -> None:
        """Raise EngineDeadError where no request can be answered any more."""

    def last_progress_at(self) -> float:
        """The monotonic second of the engine's last finished step; 0 before the first."""

    def kill(self) -> bool:
        """End a stuck engine's processes at once, so that its calls fail with EngineDeadError;
        False where it lives in this process and cannot be ended alone."""

    async def shutdown(self) -> None:
        """End the engine and its processes. May be called twice."""


def start_engine(settings: "Settings", checkpoint: "Checkpoint") -> tuple[Engine, str]:
    """Start the engine that the settings ask for; returns it and why it was taken.

    Blocks for as long as the weights take to load: call it in a thread. `auto` takes vLLM where it
    starts, else transformers. Raises whatever stops a forced engine from starting.
    """
    if settings.engine == "transformers":
        return _start_transformers(settings, checkpoint), "ADAPTER_ENGINE=transformers"
    if settings.engine == "vllm":
        return VllmEngine.start(settings, checkpoint), "ADAPTER_ENGINE=vllm"
    try:
        return VllmEngine.start(settings, checkpoint), "auto: vLLM starts here"
    except SettingsError:
        raise
    except Exception as error:
        logger.warning("vLLM does not start here, taking transformers", exc_info=True)
        why = f"auto: vLLM does not start here ({_first_line(error)})"
        return _start_transformers(settings, checkpoint), why


def _start_transformers(settings: "Settings", checkpoint: "Checkpoint") -> Engine:
    from adapter.transformers_engine import TransformersEngine

    return TransformersEngine.load(checkpoint, dtype=settings.dtype)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@dataclass(frozen=True, slots=True, eq=False)
class _Rendered:
    """A request with vLLM's own form of its input: token ids and features."""

    request: EngineRequest
    engine_input: Any


class VllmEngine:
    """vLLM's AsyncLLM with prefix caching: a request for each prompt."""

    name: EngineName = "vllm"
    continuous = True

    def __init__(
        self,
        llm: Any,
        stop_token_ids: Sequence[int],
        last_progress_at: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.llm = llm
        self._stop_token_ids = list(stop_token_ids)
        self.last_progress_at = last_progress_at

    @classmethod
    def start(cls, settings: "Settings", checkpoint: "Checkpoint") -> "VllmEngine":
        """Start vLLM's processes and load the weights (blocks for a minute and more).

        Raises SettingsError for an engine argument that vLLM does not have, EngineError where vLLM
        is missing or without our plugin, and vLLM's own errors where it cannot run.
        """
        if importlib.util.find_spec("vllm") is None:
            raise EngineError(
                "vLLM is not installed here; install the extra 'gpu' of this package, or set "
                "ADAPTER_ENGINE=transformers"
            )
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from adapter.plugin import check_registered

        check_registered(checkpoint.architecture)
        give_sockets_a_folder()
        args = AsyncEngineArgs(**engine_args(settings, checkpoint))
        progress = _Progress()
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[progress.stat_logger])
        return cls(llm, checkpoint.eos_token_ids, lambda: progress.at)

    async def prepare(self, request: EngineRequest) -> _Rendered:
        """Features are made on vLLM's renderer thread, once for each clip uuid."""
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
        if request.clip is not None:
            prompt["multi_modal_data"] = {"audio": [(request.clip.samples, SAMPLING_RATE)]}
            prompt["multi_modal_uuids"] = {"audio": [request.clip.uuid]}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        try:
            (engine_input,) = await self.llm.renderer.render_cmpl_async([prompt])
        except ValueError as error:
            raise UnprocessableError(f"vLLM refuses this prompt: {error}") from error
        _check_placeholders(engine_input, request)
        return _Rendered(request, engine_input)

    async def generate(self, prepared: Sequence[_Rendered]) -> AsyncGenerator[EngineOutput, None]:
        from vllm.exceptions import VLLMClientError, VLLMError
        from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

        (one,) = prepared
        params = self._sampling_params(one.request.sampling)
        try:
            stream = self.llm.generate(one.engine_input, params, one.request.request_id)
            async with aclosing(stream):
                async for output in stream:
                    yield _engine_output(one.request.request_id, output)
        except VllmEngineDeadError as error:
            raise EngineDeadError("the engine died; send the prompt again") from error
        except VLLMClientError as error:
            raise UnprocessableError(f"vLLM refuses this prompt: {error}") from error
        except VLLMError as error:
            raise EngineError(f"vLLM failed on this prompt: {error!r}") from error

    async def check_health(self) -> None:
        if self.llm.errored:
            raise EngineDeadError("the vLLM engine has died")

    def kill(self) -> bool:
        manager = self.llm.engine_core.resources.engine_manager
        for process in manager.processes:
            process.kill()
        return True

    async def shutdown(self) -> None:
        await asyncio.to_thread(self.llm.shutdown)

    def _sampling_params(self, sampling: Sampling) -> Any:
        """vLLM's form of the sampling. Text is made elsewhere, the same for both engines."""
        from vllm import SamplingParams
        from vllm.sampling_params import (
            RepetitionDetectionParams,
            RequestOutputKind,
            StructuredOutputsParams,
        )

        repetition = RepetitionDetectionParams(
            max_pattern_size=MAX_PATTERN_TOKENS, min_pattern_size=1, min_count=MIN_REPEATS
        )

        return SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_p=1.0 if sampling.greedy else sampling.top_p,
            seed=None if sampling.greedy else sampling.seed,
            repetition_penalty=sampling.repetition_penalty,
            repetition_detection=repetition if sampling.stop_on_repetition else None,
            structured_outputs=(
                StructuredOutputsParams(grammar=sampling.grammar) if sampling.grammar else None
            ),
            stop_token_ids=self._stop_token_ids,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )


class _Progress:
    """Notes when vLLM's core last finished a step, also one that gave no prompt a token."""

    def __init__(self) -> None:
        self.at = 0.0

    def stat_logger(self, *_: object) -> Any:
        """What vLLM takes as a factory of stat loggers."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        progress = self

        class StepClock(StatLoggerBase):
            def __init__(self) -> None:
                pass

            def record(self, *_: object, **__: object) -> None:
                progress.at = time.monotonic()

            def log_engine_initialized(self) -> None:
                pass

        return StepClock()


def give_sockets_a_folder() -> None:
    """vLLM leaves the sockets of its processes lying where they were made: let that be a folder
    that goes with this process. One that is named already stays."""
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        folder = tempfile.mkdtemp(prefix="music-flamingo-")
        os.environ["VLLM_RPC_BASE_PATH"] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def engine_args(settings: "Settings", checkpoint: "Checkpoint") -> dict[str, Any]:
    """The arguments of vLLM's AsyncEngineArgs: the adapter's, then ADAPTER_ENGINE_ARGS.

    Raises SettingsError for a key that vLLM does not have.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    _check_keys(settings.engine_args, known)
    return {
        "model": checkpoint.path,
        "revision": settings.revision,
        # vLLM's own "auto" makes bfloat16 of float32.
        "dtype": checkpoint.dtype if settings.dtype == "auto" else settings.dtype,
        "max_model_len": checkpoint.context_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "enable_prefix_caching": True,
        "limit_mm_per_prompt": {"audio": 1},
        "generation_config": "vllm",  # no sampling value that the caller did not send
        "disable_log_stats": False,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "enforce_eager": _runs_on_cpu(),  # compiling on a CPU takes minutes and gains little
        **settings.engine_args,
    }


def _check_keys(args: Mapping[str, object], known: Sequence[str]) -> None:
    for key in args:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see the fields of its AsyncEngineArgs"
            raise SettingsError(f"ADAPTER_ENGINE_ARGS: vLLM has no option {key!r}; {hint}")


def _runs_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _check_placeholders(engine_input: Mapping[str, Any], request: EngineRequest) -> None:
    """One item whose placeholders and features differ can end the engine: refuse it here."""
    ranges = engine_input.get("mm_placeholders", {}).get("audio", [])
    num_embeds = sum(item.get_num_embeds() for item in ranges)
    if num_embeds != request.num_audio_tokens:
        raise UnprocessableError(
            f"the audio gives {num_embeds} audio tokens where {request.num_audio_tokens} were "
            "expected; send it as 16 kHz WAV"
        )


def _engine_output(request_id: str, output: Any) -> EngineOutput:
    completion = output.outputs[0]
    if completion.finish_reason not in (None, "stop", "length", "repetition"):
        raise EngineError(f"vLLM ended this prompt with {completion.finish_reason!r}")
    return EngineOutput(
        request_id=request_id,
        token_ids=tuple(completion.token_ids),
        finish_reason=cast(FinishReason | None, completion.finish_reason),
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens or 0,
    )
