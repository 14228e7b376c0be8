"""Engine processes that a killed server left behind hold the GPU's memory: find and end them.

vLLM's processes name themselves `VLLM::…` and are the children of their server. One whose parent
is init has lost it. (Their environment tells nothing: the new name overwrites it.)
"""

import logging
import os

import psutil  # type: ignore[import-untyped]

logger = logging.getLogger(__name__)

INIT_PID = 1


def end_orphans() -> list[int]:
    """End this user's vLLM processes whose server is gone; returns their pids.

    To be called before this process starts an engine. Where init itself is a server, as in a
    container, nothing can be told from the parent and nothing is ended.
    """
    if _is_python(psutil.Process(INIT_PID)):
        return []
    orphans = [
        member
        for process in psutil.process_iter()
        if _is_orphan(process)
        for member in (process, *process.children(recursive=True))
    ]
    for process in orphans:
        logger.warning("ending process %d, which a killed server left behind", process.pid)
        process.kill()
    psutil.wait_procs(orphans, timeout=10)
    return [process.pid for process in orphans]


def _is_python(process: psutil.Process) -> bool:
    try:
        return "python" in str(process.name())
    except psutil.Error:
        return False


def _is_orphan(process: psutil.Process) -> bool:
    try:
        named = str(process.name()).startswith("VLLM::")
        return named and (process.ppid(), process.uids().real) == (INIT_PID, os.getuid())
    except psutil.Error:
        return False
