"""A decoder worker that does what the first bytes of a file say; run by the pool's tests alone."""

import os
import signal
import sys
import time
from typing import Any

from adapter import decoder_worker

decode = decoder_worker.decode

UNLIMITED = {"error": "NotAudioError", "code": "no_limit", "message": "A limit is missing."}


def obey(
    encoded_fd: int, samples_fd: int, max_audio_seconds: float, measure_loudness: bool
) -> dict[str, Any]:
    order = os.pread(encoded_fd, 8, 0)
    if order == b"CRASH   ":
        os.kill(os.getpid(), signal.SIGSEGV)
    if order == b"HANG    ":
        time.sleep(3600)
    if order == b"SPIN    ":
        while True:
            pass
    if order == b"SWALLOW ":
        bytearray(700 << 20)
        return UNLIMITED
    if order == b"OPEN    ":
        for _ in range(100):
            os.dup(encoded_fd)
        return UNLIMITED
    if order == b"LIE     ":
        os.write(samples_fd, bytes(4_000))
        return {"num_samples": 1_000_000, "duration_seconds": 1.0}
    return decode(encoded_fd, samples_fd, max_audio_seconds, measure_loudness)


if __name__ == "__main__":
    decoder_worker.decode = obey
    decoder_worker.main(sys.argv[1:])
