"""Engine processes that a killed server left behind hold the GPU's memory: find and end them.

A server marks the environment that its children inherit with its own pid and start time. A process
whose marked server is gone is nobody's.
"""

import logging
import os

import psutil  # type: ignore[import-untyped]

logger = logging.getLogger(__name__)

MARK = "_ADAPTER_SERVER"


def mark_children() -> None:
    """Mark the processes that this one starts from here on."""
    os.environ[MARK] = _name(psutil.Process())


def end_orphans() -> list[int]:
    """End every process of this user whose server is gone; returns their pids."""
    orphans = [process for process in psutil.process_iter() if _is_orphan(process)]
    for process in orphans:
        logger.warning("ending process %d, which a killed server left behind", process.pid)
        process.kill()
    psutil.wait_procs(orphans, timeout=10)
    return [process.pid for process in orphans]


def _is_orphan(process: psutil.Process) -> bool:
    try:
        mark = process.environ().get(MARK)
    except (psutil.Error, OSError):
        return False
    return mark is not None and not _is_alive(mark)


def _is_alive(mark: str) -> bool:
    try:
        return _name(psutil.Process(int(mark.partition("@")[0]))) == mark
    except (psutil.Error, ValueError):
        return False


def _name(process: psutil.Process) -> str:
    """A pid may be given out again, but not with the same start time."""
    return f"{process.pid}@{process.create_time():.2f}"
