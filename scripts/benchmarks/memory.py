"""What the processes of a path have of the machine's memory."""

import subprocess
from pathlib import Path

import psutil  # type: ignore[import-untyped]

KIB = 2**10
MIB = 2**20


def find_peak_bytes(pid: int) -> int | None:
    """The most memory that a process or one of its descendants had, whichever had most of them:
    that is the one that runs torch. Shared pages count in full (VmHWM of proc(5)).

    With a GPU it is what the GPU has in use now: PyTorch keeps what it once had.
    """
    used = find_gpu_bytes()
    if used is not None:
        return used
    peaks = [read_kib(f"/proc/{one}/status", "VmHWM") for one in find_pids(pid)]
    return max(peaks, default=0) * KIB or None


def find_gpu_bytes() -> int | None:
    """The memory in use on all GPUs together; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(int(line) for line in output.stdout.split()) * MIB


def find_pids(pid: int) -> list[int]:
    """A process and its descendants, the oldest first."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def find_pss_bytes(pid: int) -> int:
    """A process's memory, of what it shares only its part; 0 for one that has ended."""
    return read_kib(f"/proc/{pid}/smaps_rollup", "Pss") * KIB


def read_kib(path: str, name: str) -> int:
    """A line `name: 123 kB` of a file in /proc; 0 where there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ProcessLookupError):
        return 0
    values = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(next(values, 0))
