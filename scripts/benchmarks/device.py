"""The device at hand, measured: what its memory and its matrix unit give torch."""

import time
from collections.abc import Callable

from benchmarks.floor import Device, Shape, read_shape
from benchmarks.workload import Workload, find_device

COPY_BYTES = 10**9
MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}
REPEATS = 5  # the fastest counts: others only take away


def measure(workload: Workload) -> tuple[Shape, Device]:
    """The model's sizes and the device's rates, the latter in the workload's dtype."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(workload.model, revision=workload.revision)
    return read_shape(config), measure_device(find_device(), workload.dtype)


def measure_device(name: str, dtype: str) -> Device:
    """A copy of 1 GB, whose bytes are read and written, and a square product."""
    import torch

    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=name)
    target = torch.empty_like(source)
    copy_seconds = _fastest(lambda: target.copy_(source), name)
    size = MATRIX_SIZE[name]
    matrix = torch.ones(size, size, dtype=getattr(torch, dtype), device=name)
    product = torch.empty_like(matrix)
    product_seconds = _fastest(lambda: torch.matmul(matrix, matrix, out=product), name)
    return Device(name, 2 * COPY_BYTES / copy_seconds, 2 * size**3 / product_seconds)


def _fastest(work: Callable[[], object], device: str) -> float:
    import torch

    seconds = []
    for _ in range(REPEATS + 1):  # the first one warms up
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
