"""Engine processes that a killed server left behind hold the GPU's memory: find and end them.

A server marks the environment that its children inherit with its own pid and start time. A process
whose marked server is gone is nobody's.
"""

import logging
import os
from pathlib import Path

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
        # Not psutil's environ(): that stops at the first gap, and a process that has given itself
        # a title, as vLLM's do, has one at the start.
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return False
    marks = [part for part in environment.split(b"\0") if part.startswith(f"{MARK}=".encode())]
    return bool(marks) and not _is_alive(marks[0].decode().partition("=")[2])


def _is_alive(mark: str) -> bool:
    try:
        return _name(psutil.Process(int(mark.partition("@")[0]))) == mark
    except (psutil.Error, ValueError):
        return False


def _name(process: psutil.Process) -> str:
    """A pid may be given out again, but not with the same start time."""
    return f"{process.pid}@{process.create_time():.2f}"
