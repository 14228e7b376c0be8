"""A measurer's worker that does what a song's first sample says; run by its tests alone."""

import os
import signal
import sys
import time
from typing import Any

import numpy as np

from adapter import measure_worker

CRASH, EXHAUST, HANG, SWALLOW, LOOK = range(1, 6)

measure = measure_worker.measure


def obey(samples: measure_worker.Floats) -> dict[str, Any]:
    order = samples[0]
    if order == CRASH:
        os.kill(os.getpid(), signal.SIGSEGV)
    if order == EXHAUST:
        os.kill(os.getpid(), signal.SIGXCPU)  # as the kernel does at the limit of processor time
    if order == HANG:
        time.sleep(3600)
    if order == SWALLOW:
        np.ones(2 << 30, np.uint8)
    if order == LOOK:
        found = {"niceness": os.nice(0), "secrets": [name for name in os.environ if "HF" in name]}
        return {**measure(samples), "key": repr(found)}
    return measure(samples)


if __name__ == "__main__":
    measure_worker.measure = obey
    measure_worker.main(sys.argv[1:])
