"""What an error of torch means for an engine: too much at once, a lost GPU, or a failed call."""

import gc
import logging
import traceback
from contextlib import suppress

import torch

from adapter.errors import AdapterError, EngineDeadError, EngineError, EngineOutOfMemoryError

logger = logging.getLogger(__name__)

# How torch, its CPU allocator and cuBLAS say that memory ran out, where the type does not.
OUT_OF_MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def as_adapter_error(error: Exception, work: str) -> AdapterError:
    """The error to raise in place of one that `work` ("generate() on 8 prompts") met.

    Logs it, with its traceback where that tells more than the message, and lets go of the tensors
    that the traceback holds. Raise the result outside the `except` block.
    """
    if isinstance(error, AdapterError):
        return error
    failure: EngineError
    if is_out_of_memory(error):
        logger.warning("%s ran out of memory: %s", work, str(error).partition("\n")[0])
        failure = EngineOutOfMemoryError(
            f"{work} needs more memory than there is; "
            "lower group_size or send a shorter part of the song"
        )
    elif is_context_lost(error):
        logger.error("%s lost the GPU", work, exc_info=error)
        failure = EngineDeadError(f"{work} lost the GPU; the engine must be started anew")
    else:
        logger.error("%s failed", work, exc_info=error)
        failure = EngineError(f"{work} failed; the server's log says why")
    traceback.clear_frames(error.__traceback__)
    failure.__cause__ = error
    return failure


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        message in str(error) for message in OUT_OF_MEMORY_MESSAGES
    )


def is_context_lost(error: Exception) -> bool:
    """True after a failed assertion or access on the device: every later call fails alike."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and "CUDA error" in str(error)
    )


def free_memory() -> None:
    """Give back what is no longer referred to, to the system and to other users of the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # a lost context cannot even free
            torch.cuda.empty_cache()
