"""The supervisor, on engines that the test plays."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("fastapi")

from engines import PlayedEngine, played

from specdec.serve.errors import ApiError
from specdec.serve.process import supervisor as supervisors
from specdec.serve.process.child import ProcessLost, ProcessRefused
from specdec.serve.process.client import EngineClient
from specdec.serve.process.messages import Cancel, Generate, Output, ServerGone
from specdec.serve.process.supervisor import MAX_QUICK_ENDS, Supervisor

Play = Callable[[PlayedEngine], int]


class Recorder:
    """Users of an engine that note events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.engine: EngineClient | None = None
        self.changed = asyncio.Event()

    def open(self, engine: EngineClient) -> None:
        self.engine = engine
        self._note("open")

    def lose(self, *, is_final: bool) -> None:
        self._note("final" if is_final else "lose")

    def _note(self, word: str) -> None:
        self.events.append(word)
        self.changed.set()

    async def until(self, *words: str) -> None:
        while tuple(self.events[-len(words) :]) != words:
            self.changed.clear()
            await self.changed.wait()


def supervise(
    plays: list[Play], work: Callable[[Recorder, Supervisor], Any], seconds: float = 0.4
) -> tuple[list[str], list[str], int | None]:
    """Return (events of the users, what was said, the result of `run`)."""
    said: list[str] = []

    async def main() -> tuple[list[str], list[str], int | None]:
        users = Recorder()
        supervisor = Supervisor(played(*plays), users, said.append, seconds)
        running = asyncio.create_task(supervisor.run())
        await work(users, supervisor)
        supervisor.end()
        return users.events, said, await running

    return asyncio.run(asyncio.wait_for(main(), 30))


def lives(engine: PlayedEngine) -> int:
    """Give signs of life until the server sends no more."""
    engine.load()
    threading.Thread(target=engine.beat, args=(20,), daemon=True).start()
    with suppress(ServerGone):
        while True:
            engine.socket.receive()
    engine.kill()
    return 0


def dies(engine: PlayedEngine) -> int:
    engine.load()
    return -signal.SIGABRT


def test_one_that_cannot_load_the_model_ends_the_server() -> None:
    async def work(users: Recorder, supervisor: Supervisor) -> None:
        await asyncio.sleep(0.1)

    events, said, code = supervise([lambda engine: 2], work)
    assert (events, said, code) == ([], [], 2)


def test_it_is_given_up_after_ends_without_any_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisors, "_MAX_DELAY_SECONDS", 0.0)

    async def work(users: Recorder, supervisor: Supervisor) -> None:
        await users.until("final")
        await asyncio.sleep(0.2)  # how it ended is known a little later

    events, said, code = supervise([dies], work)
    assert events == ["open", "lose"] * (MAX_QUICK_ENDS - 1) + ["open", "final"]
    assert said[0] == "error: the engine was killed by SIGABRT; it is started again"
    assert said[-1] == (
        "error: the engine was killed by SIGABRT: it ended 5 times in a row without any output, so "
        "it stays down until the server is started again"
    )
    assert code is None


def refuses(engine: PlayedEngine) -> int:
    raise ProcessRefused


def test_one_whose_machine_cannot_run_it_is_given_up_at_once() -> None:
    async def work(users: Recorder, supervisor: Supervisor) -> None:
        await users.until("final")
        await asyncio.sleep(0.2)

    events, said, code = supervise([dies, refuses, lives], work)
    assert events == ["open", "lose", "lose", "final"]
    assert said == [
        "error: the engine was killed by SIGABRT; it is started again",
        "error: the engine cannot begin there: its machine cannot run it, so it stays down until "
        "the server is started again",
    ]
    assert code is None


def test_a_machine_that_cannot_run_the_first_one_ends_the_server() -> None:
    async def work(users: Recorder, supervisor: Supervisor) -> None:
        await asyncio.sleep(0.1)

    events, _, code = supervise([refuses], work)
    assert (events, code) == ([], 2)


def test_one_that_gave_output_is_started_as_often_as_it_ends() -> None:
    def answers_and_dies(engine: PlayedEngine) -> int:
        engine.load()
        message = engine.socket.receive()
        assert isinstance(message, Generate)
        engine.socket.send(Output(message.id, "some"))
        return -signal.SIGKILL

    async def work(users: Recorder, supervisor: Supervisor) -> None:
        for _ in range(2 * MAX_QUICK_ENDS):
            await users.until("open")
            assert users.engine is not None
            request = users.engine.generate(b"")
            users.events.clear()
            assert await request.next() == "some"
            with pytest.raises(ApiError, match="started again") as error:
                await request.next()
            assert (error.value.status, error.value.code) == (503, "engine_lost")
            assert await request.ended == ()

    _, said, _ = supervise([answers_and_dies], work)
    assert "SIGKILL, as when memory runs out" in said[-1]


def test_one_that_is_lost_with_its_machine_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(self: PlayedEngine) -> int:
        raise ProcessLost("the node is dead")

    monkeypatch.setattr(PlayedEngine, "wait", lost)

    async def work(users: Recorder, supervisor: Supervisor) -> None:
        await users.until("open", "lose", "open")

    _, said, _ = supervise([dies, lives], work)
    assert said == ["error: the engine was lost: the node is dead; it is started again"]


def beats(engine: PlayedEngine) -> int:
    """Take requests, never end one, and give signs of life."""
    engine.load()
    engine.beat(20)
    return 0


def test_one_without_a_sign_of_life_is_killed() -> None:
    def hangs(engine: PlayedEngine) -> int:
        engine.load()
        engine.is_killed.wait(20)
        return 0

    async def work(users: Recorder, supervisor: Supervisor) -> None:
        await users.until("open", "lose", "open")

    _, said, _ = supervise([hangs, lives], work)
    assert "gave no sign of life for 0.4 s and was killed; it is started again" in said[0]


def test_a_slow_pass_is_no_hang() -> None:
    async def work(users: Recorder, supervisor: Supervisor) -> None:
        await users.until("open")
        assert users.engine is not None
        users.engine.generate(b"")
        await asyncio.sleep(1.2)  # three times the limit
        assert users.events == ["open"]
        users.engine.requests[1].cancel()
        await users.until("open", "lose", "open")  # a cancelled pass must end

    _, said, _ = supervise([beats, lives], work)
    assert "did not end cancelled requests for 0.4 s and was killed" in said[0]


def test_a_cancelled_request_beside_others_is_waited_for() -> None:
    """Sequences of a cancelled request end after the pass that they share."""
    received: list[Any] = []

    def takes(engine: PlayedEngine) -> int:
        engine.load()
        received.extend(engine.socket.receive() for _ in range(3))
        engine.beat(20)
        return 0

    async def work(users: Recorder, supervisor: Supervisor) -> None:
        await users.until("open")
        assert users.engine is not None
        first = users.engine.generate(b"")
        users.engine.generate(b"")
        first.cancel()
        first.cancel()
        await asyncio.sleep(1.2)
        assert users.events == ["open"]
        assert [type(message) for message in received] == [Generate, Generate, Cancel]
        for request in users.engine.requests.values():
            request.cancel()
        await users.until("open", "lose", "open")

    _, said, _ = supervise([takes, lives], work)
    assert "did not end cancelled requests" in said[0]
