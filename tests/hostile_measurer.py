"""A measurer's worker that does what a song's first sample says; run by its tests alone."""

import json
import os
import resource
import signal
import sys
import time
from typing import Any

import numpy as np

from adapter import measure_worker

CRASH, EXHAUST, HANG, SPIN, SWALLOW, LOOK = range(1, 7)
LOOKING_SECONDS = 1.5  # of the processor

measure = measure_worker.measure


def obey(samples: measure_worker.Floats) -> dict[str, Any]:
    order = samples[0]
    if order == CRASH:
        os.kill(os.getpid(), signal.SIGSEGV)
    if order == EXHAUST:
        os.kill(os.getpid(), signal.SIGXCPU)  # as the kernel does at the limit of processor time
    if order == HANG:
        time.sleep(3600)
    if order == SPIN:
        while True:
            pass
    if order == SWALLOW:
        np.ones(2 << 30, np.uint8)
    if order == LOOK:
        return {**measure(samples), "key": json.dumps(look())}
    return measure(samples)


def look() -> dict[str, Any]:
    """What a worker can tell of itself, after a while on the processor."""
    cpu_seconds_left = resource.getrlimit(resource.RLIMIT_CPU)[0] - time.process_time()
    started = time.process_time()
    while time.process_time() - started < LOOKING_SECONDS:
        pass
    return {
        "niceness": os.nice(0),
        "secrets": [name for name in os.environ if "HF" in name],
        "cpu_seconds_left": cpu_seconds_left,
    }


if __name__ == "__main__":
    measure_worker.measure = obey
    measure_worker.main(sys.argv[1:])
