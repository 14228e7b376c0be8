"""Each path in a process of its own: its memory is free when it ends, its crash is its own."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.device import measure
from benchmarks.floor import Device, Shape
from benchmarks.workload import Outcome, Report, Workload

PATHS = {
    "hf-sequential": "benchmarks.huggingface:run_sequential",
    "hf-groups": "benchmarks.huggingface:run_groups",
    "adapter-vllm": "benchmarks.adapter_server:run_vllm",
    "adapter-transformers": "benchmarks.adapter_server:run_transformers",
    "async-llm": "benchmarks.async_llm:run",
    "vllm-openai": "benchmarks.vllm_openai:run",
}
"""Where each path is implemented: a function of (Workload, Report) that returns an Outcome."""

TWICE = ("adapter-vllm", "async-llm", "vllm-openai")  # also ask with the song known


def measure_floor(workload: Workload) -> tuple[Shape, Device]:
    """The model's sizes and the device's rates, in a process that has the device for itself."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, workload).result()


def run_path(path: str, workload: Workload, log: Path, report: Report) -> Outcome:
    """Run a path to its end; a failure is in the outcome's `error`. Its output goes to `log`."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(PATHS[path], workload, log, sender))
    process.start()
    sender.close()
    try:
        return _listen(receiver, report)
    except EOFError:
        process.join()
        return Outcome(error=f"its process ended with exit code {process.exitcode}")
    finally:
        if process.is_alive() and sys.exc_info()[0] is not None:
            process.terminate()
        process.join()


def _listen(receiver: "Connection[Any, Any]", report: Report) -> Outcome:
    while True:
        message = receiver.recv()
        if isinstance(message, Outcome):
            return message
        report(*message)


def _work(place: str, workload: Workload, log: Path, sender: "Connection[Any, Any]") -> None:
    """The process: whatever goes wrong becomes the outcome, the traceback goes to the log."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server is ended, too
    _send_output_to(log)
    try:
        run = _load(place)
        outcome = run(workload, lambda done, doing: sender.send((done, doing)))
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(error=f"{type(error).__name__}: {error}")
    with suppress(BrokenPipeError):
        sender.send(outcome)


def _load(place: str) -> Callable[[Workload, Report], Outcome]:
    module, _, name = place.partition(":")
    run: Callable[[Workload, Report], Outcome] = getattr(import_module(module), name)
    return run


def _send_output_to(log: Path) -> None:
    """Also that of C libraries and of child processes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
