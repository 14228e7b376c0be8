"""Which signals reach the processes under this one, and their end."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.synchronize import Event

import psutil
import pytest

from adapter.processes import deaf_to_ctrl_c


def listening(ready: Event) -> None:
    """Ends at either signal, by a handler of its own: what vLLM's engine does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    ready.set()
    time.sleep(60)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_does_not_hear_ctrl_c_but_ends_at_sigterm(method: str) -> None:
    context = multiprocessing.get_context(method)
    ready = context.Event()
    child = context.Process(target=listening, args=(ready,))
    starting = threading.Thread(target=deaf_to_ctrl_c()(child.start))
    starting.start()
    starting.join()
    try:
        assert ready.wait(30)
        os.kill(child.pid or 0, signal.SIGINT)
        child.join(0.5)
        assert child.is_alive()
        child.terminate()
        child.join(5)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()


FIRST_CHILD = """
import multiprocessing, signal, time
from adapter.processes import deaf_to_ctrl_c
with deaf_to_ctrl_c():
    multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,)).start()
    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_the_first_child_of_all_is_deaf_too_although_a_tracker_starts_with_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CHILD], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "True"


def test_this_process_hears_it_as_before() -> None:
    with deaf_to_ctrl_c():
        pass
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


PARENT = """
import subprocess, sys
from multiprocessing import resource_tracker
from adapter.processes import kill_descendants
resource_tracker.ensure_running()
subprocess.Popen(["sh", "-c", "sleep 60; true"])
print("ready", flush=True)
sys.stdin.readline()
kill_descendants()
print("done", flush=True)
sys.stdin.readline()
"""


def test_all_descendants_are_killed_but_the_resource_tracker() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin and parent.stdout
    try:
        parent.stdout.readline()
        while len(below := psutil.Process(parent.pid).children(recursive=True)) < 3:
            time.sleep(0.05)
        trackers = [process for process in below if "resource_tracker" in str(process.cmdline())]
        parent.stdin.write("\n")
        parent.stdin.flush()
        parent.stdout.readline()
        time.sleep(0.2)
        alive = [p for p in below if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert alive == trackers and len(trackers) == 1
    finally:
        parent.kill()
        parent.wait()
