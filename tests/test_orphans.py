"""What a killed server left behind is found by the mark of its environment, and ended."""

import os
import signal
import subprocess
import sys
import time

import psutil

from adapter.orphans import MARK, end_orphans

SERVER = """
import subprocess, sys, time
from adapter.orphans import mark_children
mark_children()
title = "import setproctitle, time; setproctitle.setproctitle('VLLM::EngineCore'); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", title])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_child_is_spared_while_its_server_lives_and_ended_when_it_was_killed() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    child = psutil.Process(int(server.stdout.readline()))
    time.sleep(1)  # until the child has given itself a title, as vLLM's processes do
    assert child.pid not in end_orphans()
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert child.pid in end_orphans()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_pid_that_was_given_out_again_protects_nobody() -> None:
    environment = os.environ | {MARK: f"{os.getpid()}@1.00"}
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=environment
    )
    time.sleep(0.2)
    assert child.pid in end_orphans()
    child.wait()


def test_processes_without_a_mark_are_left_alone() -> None:
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=environment
    )
    time.sleep(0.2)
    assert child.pid not in end_orphans()
    child.kill()
    child.wait()
