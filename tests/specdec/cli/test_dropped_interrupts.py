"""A Ctrl-C that Python drops comes again."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, sys, time
from specdec.cli.dropped_interrupts import send_dropped_interrupts_again

send_dropped_interrupts_again()
n_dropped = 0

def compare(*_):
    global n_dropped
    n_dropped += 1
    if n_dropped == 1:
        raise KeyboardInterrupt
    if n_dropped == 2:
        raise ValueError("another error")
    return 0

class Dropped:
    def __del__(self):
        raise KeyboardInterrupt

numbers = (ctypes.c_int * 4)(1, 2, 3, 4)
kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
try:
    {drop}
    time.sleep(60)
except KeyboardInterrupt:
    print("ended")
"""
IN_CALLBACK = "ctypes.CDLL(None).qsort(numbers, 4, 4, kind(compare))"


def run(drop: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(drop=drop)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )


def test_in_a_ctypes_callback() -> None:
    done = run(IN_CALLBACK)
    assert done.stdout == "ended\n", done.stderr
    assert "ValueError: another error" in done.stderr, "other errors are told as before"
    assert "KeyboardInterrupt" not in done.stderr


def test_in_a_destructor() -> None:
    assert run("Dropped()").stdout == "ended\n"
