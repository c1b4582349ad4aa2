"""Calls on a thread of their own: Ctrl-C at any moment ends them, and the thread serves on."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from interrupting import interrupted

from offload.process.interruptible import CallThread, call_aside

# An interrupt inside of what is being dropped is reported, not raised.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SIGNALS = """
import os, random, signal, sys, threading, time
from offload.process.interruptible import CallThread

thread, rng = CallThread("calls"), random.Random({seed})
ended, n_interrupted = time.monotonic() + {seconds}, 0
main = threading.main_thread().ident
go = threading.Semaphore(0)

def press():
    while go.acquire():
        time.sleep(rng.uniform(0, 5e-4))
        signal.pthread_kill(main, signal.SIGINT)

threading.Thread(target=press, daemon=True).start()
while time.monotonic() < ended:
    stopped, running = [], []
    def call():
        running.append(1)
        until = time.perf_counter() + 3e-4
        while time.perf_counter() < until and not stopped:
            pass
        running.clear()
    try:
        go.release()
        while True:
            stopped.clear()
            thread.run(call, lambda: stopped.append(1))
    except KeyboardInterrupt:
        n_interrupted += 1
    thread.settle()
    assert not running
thread.close()
print(n_interrupted)
"""


class Work:
    """A call that goes on until it is stopped."""

    def __init__(self) -> None:
        self.began, self.stopped = threading.Event(), threading.Event()
        self.is_running = False

    def call(self) -> str:
        self.is_running = True
        self.began.set()
        assert self.stopped.wait(10)
        self.is_running = False
        return "stopped"


@pytest.fixture
def thread() -> Iterator[CallThread]:
    made = CallThread("test-calls")
    yield made
    made.close()
    made.close()
    assert not made._thread.is_alive()


def is_usable(thread: CallThread) -> bool:
    return thread.run(lambda: 7, lambda: None) == 7


def test_calls_run_elsewhere_and_give_their_results(thread: CallThread) -> None:
    found = {thread.run(threading.current_thread, lambda: None) for _ in range(3)}
    assert len(found) == 1
    assert threading.current_thread() not in found


def test_errors_are_raised_here(thread: CallThread) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        thread.run(fail, lambda: None)
    assert is_usable(thread)


def test_an_interrupt_stops_the_call_also_before_it_has_begun(
    thread: CallThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop that comes too early is repeated."""
    n_stops = threading.Semaphore(0)

    def call() -> None:
        n_stops.acquire()
        n_stops.acquire()

    wait, interrupts = thread._jobs.wait_until_empty, [KeyboardInterrupt]

    def interrupted_wait(*poll: object) -> None:
        if interrupts:
            raise interrupts.pop()
        wait(*poll)  # type: ignore[arg-type]

    monkeypatch.setattr(thread._jobs, "wait_until_empty", interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        thread.run(call, n_stops.release)
    assert is_usable(thread)


@pytest.mark.parametrize("then", [None, 1, 2, 3, 4])
def test_an_interrupt_at_every_call(thread: CallThread, then: int | None) -> None:
    places: set[str] = set()
    for first in range(1, 100):
        work = Work()
        with interrupted(first, then) as interrupts:
            thread.run(work.call, work.stopped.set) if first < 6 else thread.run(int, int)
        thread.settle()
        assert not work.is_running
        places.update(interrupts.places)
        assert is_usable(thread)
        if not interrupts.places:
            break
    assert {"interruptible.py:run", "interruptible.py:wait_until_empty"} <= places


def test_a_thread_for_one_call_ends_with_it() -> None:
    for first in range(1, 100):
        with interrupted(first) as interrupts:
            assert call_aside("test-aside", lambda: 7) == 7
        if not interrupts.places:
            break
    # An interrupted end leaves it to the garbage collector.
    for left in [t for t in threading.enumerate() if t.name == "test-aside"]:
        left.join(10)
        assert not left.is_alive()


def test_closing_ends_a_call_that_was_left_running() -> None:
    thread, work = CallThread("test-calls"), Work()
    thread.begin(lambda: void(work), work.stopped.set)
    work.began.wait()
    thread.close()
    assert not work.is_running


def void(work: Work) -> None:
    with suppress(AssertionError):
        work.call()


def test_signals_at_any_time() -> None:
    program = SIGNALS.format(seed=random.Random(0).random(), seconds=3)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert int(done.stdout) > 10  # some hundreds where nothing else runs
