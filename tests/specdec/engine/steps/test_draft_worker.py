"""Two threads at work: both end together, the first error is raised, and nothing stays behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from specdec.engine.draft_worker import DraftWorker


@pytest.fixture
def ahead() -> Iterator[DraftWorker]:
    rest = set(threading.enumerate())
    thread = DraftWorker()
    yield thread
    thread.close()
    thread.close()
    assert set(threading.enumerate()) <= rest


class Work:
    """A pass or a draft that runs until it is cancelled, or as instructed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began, self.cancelled = threading.Event(), threading.Event()
        self.is_running = False

    def until_cancelled(self, *_: object) -> None:
        self.is_running = True
        self.began.set()
        self.cancelled.wait()
        self.is_running = False
        raise RuntimeError(f"{self.name} was cancelled")

    def until_stopped(self, should_stop: Callable[[], bool]) -> None:
        self.is_running = True
        self.began.set()
        while not should_stop():
            pass
        self.is_running = False

    def cancel(self) -> None:
        self.cancelled.set()


@pytest.fixture
def draft() -> Work:
    return Work("the draft")


@pytest.fixture
def passing() -> Work:
    return Work("the pass")


def is_usable(ahead: DraftWorker) -> bool:
    draft = Work("another draft")

    def run_pass() -> str:
        draft.began.wait()
        return "done"

    result = ahead.draft_during(run_pass, draft.cancel, draft.until_stopped, draft.cancel)
    return result == "done" and not draft.is_running and not draft.cancelled.is_set()


def test_the_pass_runs_here_and_the_draft_elsewhere(ahead: DraftWorker) -> None:
    threads = []
    drafting = threading.Event()

    def run_pass() -> int:
        drafting.wait()
        drafting.clear()
        threads.append(threading.current_thread())
        return 7

    def run_draft(should_stop: Callable[[], bool]) -> None:
        threads.append(threading.current_thread())
        drafting.set()

    for _ in range(3):
        assert ahead.draft_during(run_pass, run_pass, run_draft, run_pass) == 7
    assert threads[1::2] == [threading.current_thread()] * 3
    assert len(set(threads)) == 2, "one thread serves all passes"


def test_it_ends_where_it_rests_and_begins_again(ahead: DraftWorker) -> None:
    """A thread that once computed has workers, which slow all products of others."""
    rest = set(threading.enumerate())
    assert is_usable(ahead)
    assert set(threading.enumerate()) > rest
    ahead.close()
    assert set(threading.enumerate()) == rest
    assert is_usable(ahead)


def test_a_draft_that_has_begun_something_finishes_it(ahead: DraftWorker, draft: Work) -> None:
    """It is not cancelled: its results are needed."""
    pass_ended = threading.Event()
    finished = []

    def run_pass() -> None:
        draft.began.wait()
        pass_ended.set()

    def run_draft(should_stop: Callable[[], bool]) -> None:
        draft.began.set()
        pass_ended.wait()
        while not should_stop():
            pass
        finished.append("level")

    ahead.draft_during(run_pass, draft.cancel, run_draft, draft.cancel)
    assert finished == ["level"]
    assert not draft.cancelled.is_set()


def test_an_error_of_the_pass_ends_the_draft(ahead: DraftWorker, draft: Work) -> None:
    def run_pass() -> None:
        draft.began.wait()
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        ahead.draft_during(run_pass, lambda: None, draft.until_cancelled, draft.cancel)
    assert not draft.is_running
    assert is_usable(ahead)


def test_an_error_of_the_draft_ends_the_pass_and_is_the_one_raised(
    ahead: DraftWorker, passing: Work
) -> None:
    def run_draft(should_stop: Callable[[], bool]) -> None:
        raise OSError("the draft's disk is gone")

    with pytest.raises(OSError, match="the draft's disk is gone"):
        ahead.draft_during(passing.until_cancelled, passing.cancel, run_draft, lambda: None)
    assert not passing.is_running
    assert is_usable(ahead)


def test_a_cancel_that_comes_before_the_pass_is_repeated(ahead: DraftWorker) -> None:
    """A backend forgets cancels from before its pass."""
    n_cancels = threading.Semaphore(0)

    def run_pass() -> None:
        n_cancels.acquire()
        n_cancels.acquire()
        raise RuntimeError("cancelled")

    def run_draft(should_stop: Callable[[], bool]) -> None:
        raise OSError("first")

    with pytest.raises(OSError, match="first"):
        ahead.draft_during(run_pass, n_cancels.release, run_draft, lambda: None)


def test_an_error_of_the_draft_after_the_pass_is_raised(ahead: DraftWorker) -> None:
    def run_draft(should_stop: Callable[[], bool]) -> None:
        while not should_stop():
            pass
        raise OSError("late")

    with pytest.raises(OSError, match="late"):
        ahead.draft_during(lambda: 1, lambda: None, run_draft, lambda: None)
    assert is_usable(ahead)


# An interrupt in an object that is being collected is reported, not raised.
