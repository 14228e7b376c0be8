"""`make demo`, as a new user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.mark.vllm
def test_the_demo_prints_thirteen_billed_answers_on_vllm() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ADAPTER_MODEL"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "demo.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "13 answers on vllm" in done.stdout
    assert done.stdout.count(" tokens cached") == 13
