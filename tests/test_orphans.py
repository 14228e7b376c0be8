"""What a killed server left behind is found by its name and its missing parent, and ended."""

import os
import signal
import subprocess
import sys
import time

import psutil

from adapter.orphans import end_orphans

ENGINE = "import setproctitle, time; setproctitle.setproctitle('VLLM::EngineCore'); time.sleep(600)"
SERVER = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {ENGINE!r}])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_an_engine_is_spared_while_its_server_lives_and_ended_when_it_was_killed() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    engine = psutil.Process(int(server.stdout.readline()))
    while not engine.name().startswith("VLLM::"):
        time.sleep(0.01)
    assert engine.pid not in end_orphans()
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert engine.pid in end_orphans()
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_processes_of_other_names_are_left_alone() -> None:
    script = SERVER.replace("VLLM::EngineCore", "something else")
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    other = psutil.Process(int(server.stdout.readline()))
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert other.pid not in end_orphans()
    other.kill()
