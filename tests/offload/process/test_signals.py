"""Temporary signal handlers."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

from offload.process.signals import delayed_interrupt, handling


def test_a_block_has_its_own_handler_and_puts_the_others_back() -> None:
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    def work() -> None:
        with handling(signals, note):
            for number in signals:
                signal.raise_signal(number)
            raise OSError("an error ends the block")

    signals = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in signals]
    with pytest.raises(OSError, match="ends the block"):
        work()
    assert caught == list(signals)
    assert [signal.getsignal(number) for number in signals] == before


def test_what_is_ignored_stays_ignored() -> None:
    """Programs started by nohup ignore SIGHUP."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with handling((signal.SIGUSR1,), lambda number, frame: None):
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_thread_leaves_the_handlers_alone() -> None:
    actual = []

    def work() -> None:
        with handling((signal.SIGUSR1,), lambda number, frame: None):
            actual.append(signal.getsignal(signal.SIGUSR1))

    before = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert actual == [before]


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    steps: list[str] = []

    def work() -> None:
        with delayed_interrupt() as received:
            steps.append(f"begun after {len(received)}")
            signal.raise_signal(signal.SIGINT)
            steps.append(f"ended after {len(received)}")
        steps.append("went on")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["begun after 0", "ended after 1"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_is_raised_after_a_block_that_failed() -> None:
    def work() -> None:
        with delayed_interrupt():
            signal.raise_signal(signal.SIGINT)
            raise OSError("an error ends the block")

    with pytest.raises(KeyboardInterrupt):
        work()


def test_a_block_without_an_interrupt_goes_on() -> None:
    with delayed_interrupt() as received:
        pass
    assert received == []
