"""schemathesis over the document that a server serves, in a process of its own."""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

CONFIG = Path(__file__).with_name("schemathesis.toml")
ROOT = Path(__file__).parents[2]
TALLY_VARIABLE = "FUZZ_TALLY"  # the file in which hooks.py notes every answer
# Python 3.11's own fault, which hypothesis meets where it describes a deep strategy, and no sign of
# the server's: https://github.com/python/cpython/issues/106905
PYTHON_FAULT = "AST constructor recursion depth mismatch"
MAX_LINE_CHARACTERS = 1000  # its report shows whole songs


@dataclass(frozen=True)
class Run:
    """`report` is what schemathesis printed; `statuses` counts by route and status."""

    passed: bool
    report: str
    statuses: Counter[tuple[str, str]]


def run_schemathesis(url: str, *, max_examples: int, seed: int, workers: int = 1) -> Run:
    """All phases and all checks, on all routes; `max_examples` for each route."""
    run = _run(url, max_examples, seed, workers)
    if run.passed or PYTHON_FAULT not in run.report:
        return run
    again = _run(url, max_examples, seed + 1, workers)
    return Run(again.passed, again.report, run.statuses + again.statuses)


def _run(url: str, max_examples: int, seed: int, workers: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        tally = Path(folder) / "tally"
        tally.touch()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)),
                *("--no-color", "run", f"{url}/openapi.json", "--checks", "all"),
                *("--max-examples", str(max_examples), "--seed", str(seed)),
                *("--workers", str(workers)),
            ],
            cwd=ROOT,
            env={**os.environ, TALLY_VARIABLE: str(tally), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            errors="replace",
        )
        lines = (line.split("\t") for line in tally.read_text().splitlines())
        statuses = Counter((route, status) for route, status in lines)
    report = "\n".join(line[:MAX_LINE_CHARACTERS] for line in done.stdout.splitlines())
    return Run(done.returncode == 0, report + done.stderr[-2000:], statuses)
