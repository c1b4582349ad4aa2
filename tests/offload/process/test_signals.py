"""Temporary signal handlers."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

from offload.process.signals import handling


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
