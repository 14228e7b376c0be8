"""The processes under this one: which signals reach them, and their end where nobody else ends
them."""

import contextlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

import psutil  # type: ignore[import-untyped]


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that this thread starts inside the block never hear SIGINT.

    Ctrl-C in a terminal goes to the whole process group, and vLLM's engine would end at once with
    all its requests. It sets a handler of its own, so ignoring the signal would not last; a blocked
    signal is inherited and stays blocked. SIGTERM, by which vLLM ends its processes, gets through.
    """
    # Started inside the block, the tracker would unblock SIGINT again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_descendants() -> None:
    """Kill every process under this one, but multiprocessing's resource tracker: that one ends
    last and by itself, after it has freed the shared memory of the others."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not _is_resource_tracker(process):
                process.kill()


def _is_resource_tracker(process: psutil.Process) -> bool:
    return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
