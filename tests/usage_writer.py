"""Programs that write a usage log in a process of their own, to be killed or starved of disk.

`python tests/usage_writer.py forever DB`: eight tasks write; each stored request_id is a line.
`python tests/usage_writer.py fork DB`: the log is open and a forked child sleeps; prints its pid.
`python tests/usage_writer.py full tmpfs|file_size DIR`: the disk fills up and gets room again;
prints what happened as JSON.
"""

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from adapter import usage
from adapter.usage import UsageLog, UsageRecord

DISK_BYTES = 512 * 1024


def record(request_id: str, **values: Any) -> UsageRecord:
    """A record whose other fields have likely values."""
    usual: dict[str, Any] = {
        "http_request_id": "r-1",
        "key_name": "studio",
        "model": "nvidia/music-flamingo-2601-hf",
        "revision": "main",
        "engine": "vllm",
        "prompt_tokens": 6033,
        "completion_tokens": 64,
        "cached_tokens": 6016,
        "audio_tokens": 6000,
        "elapsed_seconds": 1.2345678,
        "gpu_usd_per_second": 0.000583,
        "cost_usd": 1.2345678 * 0.000583,
        "outcome": "stop",
    }
    return UsageRecord(request_id=request_id, **usual | values)


async def forever(path: str) -> None:
    log = UsageLog.open(path, retention_days=30)

    async def write() -> None:
        while True:
            ids = [uuid.uuid4().hex for _ in range(3)]
            await log.write([record(request_id) for request_id in ids])
            os.write(1, "".join(f"{request_id}\n" for request_id in ids).encode())

    await asyncio.gather(*[write() for _ in range(8)])


def fork(path: str) -> None:
    UsageLog.open(path)
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)


async def full(kind: str, directory: str) -> None:
    make_room = _small_tmpfs(directory) if kind == "tmpfs" else _small_files()
    log = UsageLog.open(Path(directory) / "usage.sqlite3")
    usage.RETRY_SECONDS = 0.05
    seen: dict[str, Any] = {"written": 0, "slowest_seconds": 0.0}

    async def write_until(status: str) -> None:
        while log.status != status and seen["written"] < 5000:
            begun_at = time.monotonic()
            await log.write([record(f"id-{seen['written']}")])
            seen["written"] += 1
            seen["slowest_seconds"] = max(seen["slowest_seconds"], time.monotonic() - begun_at)

    await write_until("failing")
    seen["status_when_full"] = log.status
    for _ in range(100):  # answers go on
        await log.write([record(f"id-{seen['written']}")])
        seen["written"] += 1
    seen["status_while_full"] = log.status
    make_room()
    for _ in range(100):
        await asyncio.sleep(0.05)
        if log.status == "ok":
            break
    seen["status_with_room"] = log.status
    log.close()
    seen["dropped"] = log.num_dropped
    seen["stored"] = _count(Path(directory) / "usage.sqlite3")
    print(json.dumps(seen))


def _small_tmpfs(directory: str) -> Any:
    """Fills a new tmpfs at `directory`; returns what makes room in it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", directory], check=True)
    filler = Path(directory) / "filler"
    filler.write_bytes(bytes(64 * 2**20 - DISK_BYTES))
    return filler.unlink


def _small_files() -> Any:
    """No file of this process may grow; returns what lets them."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _count(path: Path) -> int:
    import sqlite3

    connection = sqlite3.connect(path)
    (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
    assert verdict == "ok", verdict
    return int(connection.execute("SELECT count(*) FROM usage").fetchone()[0])


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "fork":
        fork(*arguments)
    else:
        asyncio.run({"forever": forever, "full": full}[command](*arguments))
