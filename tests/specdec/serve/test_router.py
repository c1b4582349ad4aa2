"""The router of several models, on engines that the test plays."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("fastapi")

from engines import PlayedEngine, model_starter

from specdec.run_options import RunOptions
from specdec.serve.errors import ApiError
from specdec.serve.options import ServeOptions
from specdec.serve.process.messages import ServerGone
from specdec.serve.router.keep_alive import parse_keep_alive
from specdec.serve.router.router import ModelRouter
from specdec.serve.router.runner import ModelRunner
from specdec.serve.router.share import ModelOptions, Share
from specdec.serve.run import Serving

Play = Callable[[PlayedEngine], int]


def lives(engine: PlayedEngine) -> int:
    """Give signs of life until the server sends no more."""
    engine.load()
    threading.Thread(target=engine.beat, args=(20,), daemon=True).start()
    with suppress(ServerGone):
        while True:
            engine.socket.receive()
    engine.kill()
    return 0


def router(
    sizes: dict[str, int], capacity: int, *plays: Play, keep_alive: float = math.inf
) -> ModelRouter:
    runners = []
    for name, n_bytes in sizes.items():
        options = ModelOptions(
            (name, f"{name}-alias"), RunOptions(name), Share(n_bytes), keep_alive, on_startup=False
        )
        runners.append(ModelRunner(options, [model_starter(*(plays or (lives,)))], print, 4.0))
    return ModelRouter(runners, Share(capacity))


def run(work: Callable[[ModelRouter], Any], made: ModelRouter) -> None:
    async def main() -> None:
        try:
            await work(made)
        finally:
            await made.end()

    asyncio.run(asyncio.wait_for(main(), 30))


def states(made: ModelRouter) -> dict[str, str]:
    return {runner.name: runner.state for runner in made.runners}


async def use(made: ModelRouter, name: str, keep_alive: float | None = None) -> None:
    """Make a request that ends at once."""
    runner = made.find(name)
    await made.acquire(runner, keep_alive)
    runner.end()


def test_models_are_loaded_on_demand_beside_each_other() -> None:
    async def work(made: ModelRouter) -> None:
        assert set(states(made).values()) == {"unloaded"}
        engines = await asyncio.gather(*(made.acquire(made.find("a")) for _ in range(3)))
        assert len(set(map(id, engines))) == 1, "they wait for the same engine"
        await use(made, "b-alias")
        assert states(made) == {"a": "ready", "b": "ready", "c": "unloaded"}

    run(work, router({"a": 4, "b": 6, "c": 1}, 10))


def test_the_least_recently_used_idle_model_makes_way() -> None:
    async def work(made: ModelRouter) -> None:
        for name in ("a", "b", "c"):
            await use(made, name)
        await use(made, "a")
        await use(made, "d")
        assert states(made) == dict.fromkeys("be", "unloaded") | dict.fromkeys("acd", "ready")
        await made.acquire(made.find("c"))  # it has a request now
        await use(made, "e")
        assert states(made) == dict.fromkeys("abd", "unloaded") | dict.fromkeys("ce", "ready")

    run(work, router({"a": 3, "b": 3, "c": 3, "d": 3, "e": 7}, 10))


def test_requests_of_a_busy_model_are_waited_for_and_new_ones_wait() -> None:
    async def work(made: ModelRouter) -> None:
        first = await made.acquire(made.find("a"))
        second = asyncio.create_task(use(made, "b"))
        while states(made) != {"a": "unloading", "b": "waiting"}:
            await asyncio.sleep(0.01)
        third = asyncio.create_task(made.acquire(made.find("a")))
        await asyncio.sleep(0.1)
        assert not second.done()
        assert not third.done()
        made.find("a").end()
        await second
        again = await third
        assert again is not first
        assert states(made) == {"a": "ready", "b": "unloaded"}

    run(work, router({"a": 6, "b": 6}, 10))


@pytest.mark.parametrize(("keep_alive", "own"), [(0.2, None), (math.inf, 0.2), (math.inf, 0.0)])
def test_a_model_is_unloaded_when_idle(keep_alive: float, own: float | None) -> None:
    async def work(made: ModelRouter) -> None:
        await made.acquire(made.find("a"), own)
        await asyncio.sleep(0.4)
        assert states(made) == {"a": "ready"}, "it is in use"
        made.find("a").end()
        while states(made) != {"a": "unloaded"}:
            await asyncio.sleep(0.01)
        await use(made, "a", math.inf)
        assert states(made) == {"a": "ready"}

    run(work, router({"a": 6}, 10, keep_alive=keep_alive))


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    async def work(made: ModelRouter) -> None:
        waiting = asyncio.create_task(made.acquire(made.find("a")))
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        assert made.find("a").is_idle
        while states(made) != {"a": "unloaded"}:
            await asyncio.sleep(0.01)

    run(work, router({"a": 6}, 10, keep_alive=0.1))


def test_a_model_that_cannot_be_loaded_fails_its_requests_alone() -> None:
    async def work(made: ModelRouter) -> None:
        for _ in range(2):  # a later request tries it again
            with pytest.raises(ApiError) as error:
                await made.acquire(made.find("a"))
            assert (error.value.status, error.value.code) == (503, "model_load_failed")
            assert made.find("a").load_error == 2
        await use(made, "a")
        assert states(made) == {"a": "ready"}

    run(work, router({"a": 6}, 10, lambda engine: 2, lambda engine: 2, lives))


def test_a_model_that_still_loads_ends_with_the_server() -> None:
    def loads_for_long(engine: PlayedEngine) -> int:
        engine.is_killed.wait(20)
        return 0

    async def work(made: ModelRouter) -> None:
        made.load(made.find("a"))
        await asyncio.sleep(0.1)
        assert states(made) == {"a": "starting"}

    run(work, router({"a": 6}, 10, loads_for_long))


def broken_starter(options: ModelOptions) -> Any:
    raise RuntimeError("a fault of ours")


def test_a_fault_of_ours_is_raised_at_the_end() -> None:
    runner = ModelRunner(ModelOptions(("a",), RunOptions("a")), [broken_starter], print, 4.0)

    async def work(made: ModelRouter) -> None:
        with pytest.raises(ApiError):
            await made.acquire(runner)
        assert states(made) == {"a": "failed"}

    with pytest.raises(RuntimeError, match="a fault of ours"):
        run(work, ModelRouter([runner], Share(1)))


def test_a_fault_of_ours_ends_the_server_as_one() -> None:
    models = [ModelOptions(("a",), RunOptions("a"))]
    server = Serving(ServeOptions(port=0), models, None, [broken_starter], print)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        server.run()


def test_another_budget_is_another_share() -> None:
    async def work(made: ModelRouter) -> None:
        await use(made, "a")
        await use(made, "b")
        a = made.find("a")
        assert made.free_bytes(a) == 6
        a.keep_budget(6, 6)
        assert made.free_bytes(made.find("b")) == 4
        await use(made, "c")
        assert states(made) == {"a": "unloaded", "b": "ready", "c": "ready"}, "it has 6 now"

    run(work, router({"a": 2, "b": 4, "c": 1}, 10))


def test_an_engine_that_cannot_be_loaded_with_another_budget_gets_the_first_one() -> None:
    async def work(made: ModelRouter) -> None:
        a = made.find("a")
        await use(made, "a")
        a.keep_budget(6, 6)
        await made.unload(a)
        assert (a.options.share, a.options.load.memory_budget) == (Share(6), 6)
        with pytest.raises(ApiError, match="could not be loaded"):
            await made.acquire(a)
        assert (a.options.share, a.options.load.memory_budget) == (Share(4), "auto")
        await use(made, "a")
        assert states(made) == {"a": "ready"}

    run(work, router({"a": 4}, 10, lives, lambda engine: 2, lives))


def test_names() -> None:
    made = router({"qwen-7b": 1, "llama:8b": 1}, 10)
    assert made.find("qwen-7b-alias") is made.find("qwen-7b:latest") is made.runners[0]
    with pytest.raises(ApiError, match="did you mean qwen-7b") as error:
        made.find("qwen-8b")
    assert error.value.status == 404
    with pytest.raises(ApiError, match=r"there is qwen-7b, qwen-7b-alias, llama:8b"):
        made.find("x" * 999)
    with pytest.raises(ApiError, match="name a model") as error:
        made.find(None)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("200ms", 0.2),
        (7, 7),
        ("7", 7),
        (0, 0),
        ("0", 0),
    ]
    + [(value, math.inf) for value in (-1, "-1", "-5m", -0.5, 1e12, "1e12", "876001h", math.inf)],
)
def test_times(text: Any, seconds: float) -> None:
    assert parse_keep_alive(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5 m", "m", "nan", True, None, [], "5d", 10**400])
def test_what_is_no_time(text: Any) -> None:
    with pytest.raises(ValueError, match="."):
        parse_keep_alive(text)
