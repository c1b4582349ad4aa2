"""What a signal handler raises comes up where the block ends, or where somebody asks for it."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
from interrupting import interrupted

from offload.process.interruptible import (
    Worker,
    WorkerClosed,
    check_interrupt,
    is_in_signal_handler,
    is_interrupted,
    uninterrupted,
    wait_for,
    when_interrupted,
)


class Alarm(Exception):
    pass


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def handler() -> Iterator[Callable[[Callable[..., object]], None]]:
    """Sets a handler of SIGINT for the time of the test."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handle: signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGINT, before)


def test_a_block_is_done_whole() -> None:
    done = []
    before = signal.getsignal(signal.SIGINT)

    @uninterrupted
    def act() -> None:
        assert not is_interrupted()
        press()
        done.append(1)
        assert is_interrupted()
        press()  # one exception for both
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        act()
    assert done == [1, 2]
    assert not is_interrupted()
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_block_inside_of_a_block_does_not_end_with_it() -> None:
    done = []

    @uninterrupted
    def inner() -> None:
        press()

    @uninterrupted
    def outer() -> None:
        inner()
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == [1]


def test_who_asks_is_told_at_once() -> None:
    done = []

    @uninterrupted
    def act() -> None:
        check_interrupt()
        press()
        done.append(1)
        check_interrupt()
        done.append(2)

    with pytest.raises(KeyboardInterrupt) as caught:
        act()
    assert done == [1]
    assert caught.value.__context__ is None


def test_the_error_that_an_interrupt_leads_to_does_not_matter() -> None:
    @uninterrupted
    def act() -> None:
        press()
        raise ValueError("the pass was cancelled")

    with pytest.raises(KeyboardInterrupt) as caught:
        act()
    assert caught.value.__suppress_context__


def test_an_error_without_an_interrupt_is_raised() -> None:
    @uninterrupted
    def act() -> None:
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        act()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_handler_that_raises_nothing_disturbs_nothing(handler: Callable[..., None]) -> None:
    """It is called at once: a program may count on it."""
    calls = []
    handler(lambda *_: calls.append(len(calls)))

    @uninterrupted
    def act() -> None:
        press()
        assert calls == [0]
        assert not is_interrupted()
        check_interrupt()

    act()
    press()
    assert calls == [0, 1]


def test_a_handler_that_sets_another_one_keeps_it(handler: Callable[..., None]) -> None:
    handler(lambda *_: signal.signal(signal.SIGINT, signal.SIG_IGN))
    uninterrupted(press)()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_whatever_it_raises_is_raised(handler: Callable[..., None]) -> None:
    def out_of_time(*_: object) -> None:
        raise Alarm

    handler(out_of_time)
    done = []

    @uninterrupted
    def act() -> None:
        press()
        done.append(1)

    with pytest.raises(Alarm):
        act()
    assert done == [1]


def test_ignored_signals_stay_ignored(handler: Callable[..., None]) -> None:
    handler(signal.SIG_IGN)
    uninterrupted(press)()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_go_on_meanwhile() -> None:
    """Signals are the main thread's."""
    found = []

    @uninterrupted
    def work() -> None:
        check_interrupt()
        found.append(is_interrupted())

    @uninterrupted
    def act() -> None:
        press()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    with pytest.raises(KeyboardInterrupt):
        act()
    assert found == [False]


@pytest.mark.parametrize("then", [None, 1, 2, 3])
def test_an_interrupt_at_every_call(then: int | None) -> None:
    """Each block is done whole or not begun, and the handlers are put back."""
    before = signal.getsignal(signal.SIGINT)
    places: set[str] = set()

    @uninterrupted
    def act() -> None:
        done.append(1)
        wait_for(worker.submit(int), lambda: None)
        done.append(2)

    worker = Worker("test-calls")
    for first in range(1, 200):
        done: list[int] = []
        with interrupted(first, then) as interrupts:
            act()
        assert done in ([], [1, 2])
        assert signal.getsignal(signal.SIGINT) is before
        places.update(interrupts.places)
        if not interrupts.places:
            break
    worker.close()
    assert {"interruptible.py:begin", "interruptible.py:wait_for"} <= places


def test_signals_at_any_time() -> None:
    def ring(*_: object) -> None:
        raise Alarm

    @uninterrupted
    def act() -> None:
        done.append(1)
        for _ in range(rng.randrange(500)):
            pass
        done.append(2)

    rng = random.Random(0)
    n_cut = n_ended = 0
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(2000):
            done: list[int] = []
            with suppress(Alarm):
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 2e-4))
                    act()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Alarm:
                    n_cut += 1
                    n_ended += done == [1, 2]
            assert done in ([], [1, 2])
            assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert n_cut > 100
    assert n_ended > 10


# --- a thread beside the caller -------------------------------------------------------------------


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("test-calls")
    yield made
    made.close()
    made.close()
    assert not [t for t in threading.enumerate() if t.name == "test-calls"]


def test_calls_run_elsewhere_and_give_their_results(worker: Worker) -> None:
    found = {wait_for(worker.submit(threading.current_thread), lambda: None) for _ in range(3)}
    assert len(found) == 1
    assert threading.current_thread() not in found


def test_errors_are_raised_here(worker: Worker) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        wait_for(worker.submit(fail), lambda: None)
    assert wait_for(worker.submit(lambda: 7), lambda: None) == 7


def test_an_interrupt_stops_the_call_again_and_again(worker: Worker) -> None:
    """A stop that comes before the call has begun may be forgotten."""
    n_stops = threading.Semaphore(0)
    ended = []
    main = threading.main_thread().ident or 0

    def call() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        n_stops.acquire()
        n_stops.acquire()
        ended.append(1)

    @uninterrupted
    def act() -> None:
        wait_for(worker.submit(call), when_interrupted(n_stops.release))

    with pytest.raises(KeyboardInterrupt):
        act()
    assert ended == [1]
    assert wait_for(worker.submit(lambda: 7), lambda: None) == 7


def test_a_call_after_the_end_is_refused() -> None:
    """Its future would never be done."""
    ended, calls = Worker("test-ended"), []
    ended.close()
    with pytest.raises(WorkerClosed, match="test-ended has ended"):
        ended.submit(lambda: calls.append(1))
    assert calls == []


def test_a_call_is_refused_where_the_end_comes_in_between() -> None:
    """From a signal handler, just before the call is handed over."""
    ending = Worker("test-ending")
    put = ending._calls.put

    class Calls:
        def put(self, call: Callable[[], None] | None) -> None:
            ending._calls = SimpleNamespace(put=put)
            ending.close()
            put(call)

    ending._calls = Calls()
    with pytest.raises(WorkerClosed):
        ending.submit(int)


def test_a_worker_that_nobody_refers_to_ends() -> None:
    worker = Worker("test-forgotten")
    thread = worker._thread
    del worker
    thread.join(10)
    assert not thread.is_alive()


def test_a_handler_is_known_from_inside(handler) -> None:
    found = []
    handler(lambda *_: found.append(is_in_signal_handler()))
    press()
    uninterrupted(press)()
    assert found == [True, True]
    assert not is_in_signal_handler()
