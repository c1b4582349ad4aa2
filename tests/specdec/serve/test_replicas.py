"""Replicas of a model: which one gets a request, and what is left when one ends."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from engines import PlayedEngine, model_starter

from specdec.run_options import RunOptions
from specdec.serve.admission import AdmissionLimiter
from specdec.serve.api.budget import BudgetResponse
from specdec.serve.api.chat import ChatRequest
from specdec.serve.api.completions import CompletionRequest
from specdec.serve.api.tokens import TokenizeRequest
from specdec.serve.endpoint import Reading
from specdec.serve.errors import ApiError
from specdec.serve.metrics import Metrics
from specdec.serve.options import ServeOptions
from specdec.serve.process import supervisor as supervisors
from specdec.serve.process.messages import (
    Ended,
    Failed,
    Generate,
    Output,
    ServerGone,
    unpickled,
)
from specdec.serve.router.budget import set_all
from specdec.serve.router.prefixes import (
    Load,
    Prefix,
    PrefixTable,
    ReplicaChooser,
    prefixes_of,
    prompt_prefixes,
)
from specdec.serve.router.router import ModelRouter
from specdec.serve.router.runner import ModelRunner
from specdec.serve.router.share import ModelOptions
from specdec.serve.run import Serving
from specdec.serve.service import Service

Play = Callable[[PlayedEngine], int]
IDLE = Load(0, 4)


# --- prefixes ---------------------------------------------------------------------------------


def chat(*contents: str, **more: Any) -> ChatRequest:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return ChatRequest.model_validate({"messages": messages, **more})


def test_a_turn_begins_with_all_prefixes_of_the_turn_before() -> None:
    first = prompt_prefixes(chat("Name three rivers."))
    second = prompt_prefixes(chat("Name three rivers.", "Rhine, Elbe, Oder.", "And lakes?"))
    assert second[: len(first)] == first
    assert first[-1].num_bytes < second[-1].num_bytes
    other = prompt_prefixes(chat("Name three rivers!", "Rhine, Elbe, Oder.", "And lakes?"))
    assert not {prefix.digest for prefix in other} & {prefix.digest for prefix in second}


def test_tools_are_a_part_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "river"}}]
    plain, offered = prompt_prefixes(chat("Hi")), prompt_prefixes(chat("Hi", tools=tools))
    assert not set(plain) & set(offered)


@pytest.mark.parametrize("prompt", ["x" * 9000, [7] * 9000, ["x" * 9000, "y"], [[7] * 9000, [8]]])
def test_prefixes_within_a_text_are_near_each_other(prompt: Any) -> None:
    prefixes = prompt_prefixes(CompletionRequest(prompt=prompt))
    lengths = [prefix.num_bytes for prefix in prefixes]
    assert lengths[0] == 64
    assert all(b - a <= max(64, a / 16) for a, b in zip(lengths, lengths[1:], strict=False))
    shown = prompt if isinstance(prompt[0], str | int) and len(prompt) > 2 else prompt[0]
    longer = prompt_prefixes(CompletionRequest(prompt=shown + shown))
    assert longer[: len(prefixes) - 1] == prefixes[:-1]


def test_a_megabyte_has_few_prefixes() -> None:
    assert 100 < len(prefixes_of([bytes(1 << 20)])) < 150


def test_requests_without_a_cached_prompt_have_none() -> None:
    assert prompt_prefixes(chat("Hi", cache_prompt=False)) == ()
    assert prompt_prefixes(TokenizeRequest(content="Hi")) == ()
    assert prompt_prefixes(CompletionRequest(prompt="")) == ()


def test_values_that_have_no_text_have_no_prefix() -> None:
    assert prompt_prefixes(chat("a \ud800 b"))
    assert prompt_prefixes(CompletionRequest(prompt="a \ud800 b"))
    assert prompt_prefixes(CompletionRequest(prompt=[1 << 64])) == ()
    nested: dict[str, Any] = {}
    for _ in range(3000):
        nested = {"a": nested}
    function = {"name": "f", "parameters": {}}
    deep = chat("Hi", tools=[{"type": "function", "function": function}])
    deep.tools[0].function.parameters = nested  # type: ignore[index, union-attr]
    assert prompt_prefixes(deep) == ()
    function["parameters"] = {"n": 10**5000}
    assert prompt_prefixes(chat("Hi", tools=[{"type": "function", "function": function}])) == ()


def test_the_table_forgets_what_was_used_first() -> None:
    table = PrefixTable(max_prefixes=100)
    prompts = [prefixes_of([bytes([number]) * 640]) for number in range(20)]  # of 10 prefixes
    table.add(prompts[0], 1)
    for prefixes in prompts[1:]:
        table.add(prefixes, 1)
        table.add(prompts[0], 2)
    assert len(table) == 100
    assert table.known_bytes(prompts[0], 1) == table.known_bytes(prompts[0], 2) == 640
    assert table.known_bytes(prompts[1], 1) == 0
    assert table.known_bytes(prompts[19], 1) == 640
    table.forget(1)
    assert len(table) == 10
    assert table.known_bytes(prompts[0], 1) == 0
    assert table.known_bytes(prompts[0], 2) == 640


# --- the choice -------------------------------------------------------------------------------


def text(*parts: str) -> tuple[Prefix, ...]:
    return prefixes_of([part.encode() for part in parts])


def test_a_known_prefix_is_worth_more_than_a_short_queue() -> None:
    chooser = ReplicaChooser()
    idle = {1: IDLE, 2: IDLE}
    first = chooser.choose(idle, text("a" * 500))
    second = chooser.choose(idle, text("b" * 500))
    assert {first, second} == {1, 2}
    busy = {**idle, first: Load(3, 4)}
    assert chooser.choose(busy, text("a" * 500, "more")) == first
    assert chooser.choose(busy, text("b" * 500, "more")) == second
    assert (chooser.num_by_prefix, chooser.num_by_load) == (2, 2)


def test_the_longer_prefix_counts() -> None:
    chooser = ReplicaChooser()
    chooser.choose({1: IDLE}, text("a" * 500))
    chooser.choose({2: IDLE}, text("a" * 500, "b" * 500))
    assert chooser.choose({1: IDLE, 2: Load(2, 4)}, text("a" * 500, "b" * 500, "c")) == 2
    assert chooser.choose({1: IDLE, 2: Load(2, 4)}, text("a" * 500, "c")) == 1, "equal: the load"


def test_a_short_common_beginning_does_not_gather_all_requests() -> None:
    chooser = ReplicaChooser()
    chosen = [
        chooser.choose({1: IDLE, 2: IDLE}, text("system" * 20, str(number) * 300))
        for number in range(6)
    ]
    assert chosen == [1, 2] * 3
    assert chooser.num_by_prefix == 0


def test_a_full_replica_is_passed_over() -> None:
    chooser = ReplicaChooser()
    prompt = text("a" * 500)
    assert chooser.choose({1: IDLE, 2: Load(1, 4)}, prompt) == 1
    assert chooser.choose({1: Load(4, 4), 2: Load(3, 4)}, prompt) == 2
    chooser.forget(2)
    assert chooser.choose({1: Load(9, 4), 2: Load(4, 4)}, prompt) == 1, "both are full"


def test_requests_without_a_prefix_are_balanced() -> None:
    chooser = ReplicaChooser()
    assert [chooser.choose({1: IDLE, 2: IDLE, 3: IDLE}, ()) for _ in range(6)] == [1, 2, 3] * 2
    assert chooser.choose({1: Load(2, 4), 2: Load(1, 4), 3: Load(2, 4)}, ()) == 2


def test_a_replica_that_ended_has_forgotten_its_prefixes() -> None:
    chooser = ReplicaChooser()
    assert chooser.choose({1: IDLE}, text("a" * 500)) == 1
    chooser.forget(1)
    assert chooser.choose({1: Load(1, 4), 2: IDLE}, text("a" * 500)) == 2


# --- the replicas of a model ------------------------------------------------------------------


def lives(engine: PlayedEngine) -> int:
    """Take requests until the server sends no more; one that says so is answered by the engine's
    end, any other one at once."""
    engine.load()
    threading.Thread(target=engine.beat, args=(20,), daemon=True).start()
    code = 0
    with suppress(ServerGone):
        while True:
            message = engine.socket.receive()
            if isinstance(message, Generate) and message.form == b"end":
                code = -signal.SIGKILL
                break
            if isinstance(message, Generate) and message.form != b"wait":
                engine.socket.send(Output(message.id, "text"))
                engine.socket.send(Ended(message.id))
    engine.kill()
    return code


def of_replicas(*plays: Sequence[Play]) -> ModelRouter:
    """Return a router of one model with as many replicas, each of which plays these engines."""
    options = ModelOptions(("m",), RunOptions("m"))
    starters = [model_starter(*play) for play in plays]
    said: list[str] = []
    router = ModelRouter([ModelRunner(options, starters, said.append, 4.0)])
    router.said = said  # type: ignore[attr-defined]  # what a server would print
    return router


def run(work: Callable[[ModelRouter, ModelRunner], Any], router: ModelRouter) -> None:
    async def main() -> None:
        (runner,) = router.runners
        try:
            router.load(runner)
            await work(router, runner)
        finally:
            await router.end()

    asyncio.run(asyncio.wait_for(main(), 30))


async def until(runner: ModelRunner, *states: str) -> None:
    while tuple(replica.state for replica in runner.replicas) != states:
        await asyncio.sleep(0.01)


def loading_for_long() -> tuple[Play, threading.Event]:
    """Return an engine like `lives` that loads its model until the event is set."""
    may_load = threading.Event()

    def late(engine: PlayedEngine) -> int:
        may_load.wait(20)
        return lives(engine)

    return late, may_load


def test_requests_are_taken_once_all_replicas_are_loaded() -> None:
    late, may_load = loading_for_long()

    async def work(router: ModelRouter, runner: ModelRunner) -> None:
        await until(runner, "ready", "starting")
        assert runner.state == "starting"
        with pytest.raises(ApiError, match="is being loaded"):
            await router.acquire(runner)
        may_load.set()
        await until(runner, "ready", "ready")
        assert runner.state == "ready"
        engines = {await router.acquire(runner) for _ in range(4)}
        assert len(engines) == 2

    run(work, of_replicas([lives], [late]))


def test_a_replica_that_ends_loses_its_requests_alone() -> None:
    late, may_load = loading_for_long()

    async def work(router: ModelRouter, runner: ModelRunner) -> None:
        await until(runner, "ready", "ready")
        first, second = [await router.acquire(runner) for _ in range(2)]
        waiting = [engine.generate(b"wait") for engine in (first, second)]
        first.generate(b"end")
        with pytest.raises(ApiError) as error:
            await waiting[0].next()
        assert error.value.code == "engine_lost"
        assert runner.state == "ready"
        for _ in range(2):
            engine = await router.acquire(runner)
            assert engine is second
            assert await engine.generate(b"").next() == "text"
        with pytest.raises(ApiError, match="started again"):
            runner.engines  # noqa: B018  # all of them
        may_load.set()
        await until(runner, "ready", "ready")
        assert len(runner.engines) == 2
        assert await router.acquire(runner) not in (first, second), "it has no request"
        assert not waiting[1].ended.done()
        assert [replica.num_restarts for replica in runner.replicas] == [1, 0]

    router = of_replicas([lives, late], [lives])
    run(work, router)
    said = router.said  # type: ignore[attr-defined]
    assert "replica 1: error: the engine was killed by SIGKILL, as when memory" in said[2]
    assert said.count("replica 1: the model is loaded") == 2


def test_prefixes_of_an_engine_that_ended_are_forgotten() -> None:
    async def work(router: ModelRouter, runner: ModelRunner) -> None:
        await until(runner, "ready", "ready")
        prompt = text("a" * 500)
        first = await router.acquire(runner, None, prompt)
        assert await router.acquire(runner, None, prompt) is first
        assert runner.replicas.chooser.num_by_prefix == 1
        with suppress(ApiError):
            await first.generate(b"end").next()
        await until(runner, "ready", "ready")
        await router.acquire(runner, None, prompt)
        assert runner.replicas.chooser.num_by_prefix == 1

    run(work, of_replicas([lives], [lives]))


def test_one_that_cannot_load_the_model_ends_all() -> None:
    ended = threading.Event()

    def loaded(engine: PlayedEngine) -> int:
        code = lives(engine)
        ended.set()
        return code

    async def work(router: ModelRouter, runner: ModelRunner) -> None:
        while runner.state != "unloaded":
            await asyncio.sleep(0.01)
        assert (runner.load_error, runner.has_been_loaded) == (2, False)
        await until(runner, "unloaded", "unloaded")
        assert ended.wait(5)

    run(work, of_replicas([loaded], [lambda engine: engine.is_killed.wait(0.3) or 2]))


def test_a_server_ends_with_the_error_of_a_replica() -> None:
    models = [ModelOptions(("m",), RunOptions("m"))]
    starters = [model_starter(lives), model_starter(lambda engine: 2)]
    said: list[str] = []
    assert Serving(ServeOptions(port=0), models, None, starters, said.append).run().load_error == 2
    assert not [line for line in said if line.startswith("ready")]


def test_replicas_are_given_up_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisors, "_MAX_DELAY_SECONDS", 0.0)

    def dies(engine: PlayedEngine) -> int:
        engine.load()
        return -signal.SIGABRT

    async def work(router: ModelRouter, runner: ModelRunner) -> None:
        while runner.state != "ready":
            await asyncio.sleep(0.01)
        await until(runner, "failed", "ready")
        assert runner.state == "ready"
        reason = "it ended 5 times in a row without any output"
        assert runner.replicas.given_up == [f"replica 1: {reason}"]
        engine = await router.acquire(runner)
        assert runner.engines == [engine]
        engine.generate(b"end")
        await until(runner, "failed", "failed")
        assert runner.state == "failed"
        with pytest.raises(ApiError) as error:
            await router.acquire(runner)
        assert error.value.code == "engine_failed"

    run(work, of_replicas([dies], [lives, dies]))


@pytest.mark.parametrize("refuses", [False, True])
def test_a_budget_is_that_of_all_replicas_or_of_none(refuses: bool) -> None:
    requested: dict[int, list[int]] = {1: [], 2: []}
    answer = BudgetResponse.model_construct(memory_budget_bytes=5)

    def replica(number: int) -> Play:
        def play(engine: PlayedEngine) -> int:
            engine.load()
            with suppress(ServerGone):
                while True:
                    message = engine.socket.receive()
                    requested[number].append(unpickled(message.form))
                    if refuses and number == 2:
                        engine.socket.send(Failed(message.id, ApiError(400, "too little")))
                    else:
                        engine.socket.send(Output(message.id, answer))
                    engine.socket.send(Ended(message.id))
            return 0

        return play

    async def work(router: ModelRouter, runner: ModelRunner) -> None:
        await until(runner, "ready", "ready")
        if refuses:
            with pytest.raises(ApiError, match="too little"):
                await set_all(runner.engines, 5)
        else:
            assert (await set_all(runner.engines, 5)).memory_budget_bytes == 5

    run(work, of_replicas([replica(1)], [replica(2)]))
    assert requested == {1: [5, 1] if refuses else [5], 2: [5]}


def test_metrics_have_the_replica() -> None:
    async def work(router: ModelRouter, runner: ModelRunner) -> None:
        await until(runner, "ready", "ready")
        metrics = Metrics(AdmissionLimiter(4), router, lambda: "ready").text().decode()
        assert 'specdec_passes_total{replica="2"} 0.0' in metrics
        assert 'specdec_replica_state{replica="2",state="ready"} 1.0' in metrics
        assert 'specdec_engine_restarts_total{replica="1"} 0.0' in metrics
        assert 'specdec_routed_requests_total{by="prefix"} 0.0' in metrics

    run(work, of_replicas([lives], [lives]))


def test_the_service_reads_prefixes_only_for_replicas() -> None:
    def read(content: bytearray) -> Any:
        return Reading(CompletionRequest(prompt=content.decode()))

    for plays, has_prefixes in (([[lives]], False), ([[lives]] * 2, True)):
        service = Service(ServeOptions(), of_replicas(*plays))
        _, reading = asyncio.run(service.form(read, bytearray(b"x" * 99)))
        assert bool(reading.prefixes) == has_prefixes
