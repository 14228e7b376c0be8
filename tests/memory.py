"""What processes hold in memory, watched while something happens."""

import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil


def figures_bytes(pid: int) -> dict[str, int]:
    """The figures of proc(5) `status` that are given in kB; none of a process that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: int(kb) * 1024 for name, kb in re.findall(r"(\w+):\s+(\d+) kB", status)}


def peak_bytes(pid: int) -> int:
    """The most that was resident at once, since `forget_peak`."""
    return figures_bytes(pid).get("VmHWM", 0)


def forget_peak(pid: int) -> int:
    """Let the peak start anew, as proc(5) says of clear_refs; what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return figures_bytes(pid)["VmRSS"]


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and all its descendants."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def family_bytes(process: psutil.Process) -> int:
    """What a process and its descendants hold resident.

    Memory files count whole, since what is written to one is in no process's share until it is
    mapped there. Pages of programs and libraries count for each process that has them mapped.
    """
    pids = [member.pid for member in family(process)]
    figures = [figures_bytes(pid) for pid in pids]
    own = sum(one.get("RssAnon", 0) + one.get("RssFile", 0) for one in figures)
    shared = sum(one.get("RssShmem", 0) for one in figures)
    return own + max(shared, memory_file_bytes(pids))


def memory_file_bytes(pids: Iterable[int]) -> int:
    sizes = {}
    for link in (link for pid in pids for link in open_files(pid)):
        with suppress(OSError):
            if str(link.readlink()).startswith("/memfd:"):
                stat = link.stat()
                sizes[stat.st_ino] = stat.st_blocks * 512
    return sum(sizes.values())


def open_files(pid: int) -> list[Path]:
    """The links of proc(5) to what a process has open."""
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


@dataclass
class Watch:
    """Reads a figure every 50 ms in a thread of its own; `readings` are (time, figure)."""

    read: Callable[[], int]
    readings: list[tuple[float, int]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.readings.append((time.monotonic(), self.read()))
            if self._ended.wait(0.05):
                return

    @property
    def peak(self) -> int:
        return max(figure for _, figure in self.readings)

    def peak_between(self, start: float, end: float) -> int:
        return max((figure for at, figure in self.readings if start <= at <= end + 0.1), default=0)
