"""Generations in an event loop, with chunks from the engine's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from tiny_pair import save_model

import specdec
from offload.budget import BudgetExceeded
from offload.units import MIB
from specdec import LLM, AsyncLLM
from specdec.checks import ConfigError
from specdec.engine.engine_thread import ModelClosed
from specdec.engine.sequences.outputs import PromptProgress

PROMPT = [5, 6, 7]
LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    target = save_model(tmp_path_factory.mktemp("target"), seed=0)
    with specdec.load(target, ctx_size=512, threads=1) as loaded:
        yield loaded


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def test_generate_gives_what_the_llm_gives(llm: LLM) -> None:
    options = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "n": 2}
    actual = run(AsyncLLM(llm).generate(PROMPT, **options))
    assert actual.outputs == llm.generate(PROMPT, **options).outputs


def test_chunks_add_up_to_the_result(llm: LLM) -> None:
    async def work() -> None:
        stream = AsyncLLM(llm).stream(PROMPT, max_tokens=20)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == stream.result.text
        assert sum((chunk.token_ids for chunk in chunks), ()) == stream.result.token_ids
        assert stream.result.finish_reason == "length"
        assert all(chunk.logprobs is None for chunk in chunks)

    run(work())


def test_the_memory_budget_changes_beside_a_stream(llm: LLM) -> None:
    expected = llm.generate(PROMPT, **LONG).token_ids
    before = llm.plan.budget_bytes

    async def work() -> None:
        model = AsyncLLM(llm)
        stream = model.stream(PROMPT, **LONG)
        await stream.started()
        plan = await model.set_memory_budget(before - 100 * MIB)
        assert plan.budget_bytes == llm.plan.budget_bytes == before - 100 * MIB
        assert [chunk async for chunk in stream]
        assert stream.result.token_ids == expected
        with pytest.raises(BudgetExceeded):
            await model.set_memory_budget("50MiB")

    run(work())
    llm.set_memory_budget(before)


def test_progress_of_a_long_prompt(llm: LLM) -> None:
    async def work() -> None:
        received: list[PromptProgress] = []
        prompt = [1 + i % 50 for i in range(300)]
        stream = AsyncLLM(llm).stream(prompt, max_tokens=2)
        stream.on_progress = received.append
        assert [chunk async for chunk in stream]
        assert {part.num_prompt_tokens for part in received} == {300}
        counts = [part.num_processed for part in received]
        assert counts == sorted(counts)
        assert (received[0].num_cached, counts[-1]) == (0, 300)

    run(work())


def test_chunks_carry_the_log_probabilities_of_their_tokens(llm: LLM) -> None:
    async def work() -> None:
        options = {"max_tokens": 9, "logprobs": 2, "temperature": 1.0, "seed": 5, "n": 2}
        stream = AsyncLLM(llm).stream(PROMPT, **options)
        chunks = [chunk async for chunk in stream if chunk.token_ids]
        for index, output in enumerate(stream.result.outputs):
            own = [chunk for chunk in chunks if chunk.index == index]
            assert sum((chunk.logprobs for chunk in own), ()) == output.logprobs
            assert sum((chunk.top_logprobs for chunk in own), ()) == output.top_logprobs

    run(work())


def test_many_tasks_at_once(llm: LLM) -> None:
    async def work() -> list[Any]:
        server = AsyncLLM(llm)
        jobs = [server.generate([i + 3, 7], max_tokens=6 + i) for i in range(8)]
        return await asyncio.gather(*jobs)

    for i, result in enumerate(run(work())):
        assert result.outputs == llm.generate([i + 3, 7], max_tokens=6 + i).outputs


def test_what_is_wrong_with_the_arguments_is_raised_before_the_first_chunk(llm: LLM) -> None:
    async def work() -> None:
        stream = AsyncLLM(llm).stream(PROMPT, max_tokens=0)
        with pytest.raises(ConfigError, match="max_tokens"):
            await stream.started()
        with pytest.raises(ConfigError, match="max_tokens"):
            await stream.__anext__()

    run(work())


def test_an_error_of_the_generation_reaches_its_reader(llm: LLM) -> None:
    def fail(ids: Any, scores: Any) -> Any:
        raise ZeroDivisionError("of the processor")

    with pytest.raises(ZeroDivisionError, match="of the processor"):
        run(AsyncLLM(llm).generate(PROMPT, logits_processors=[fail]))
    assert run(AsyncLLM(llm).generate(PROMPT, max_tokens=2)).finish_reason == "length"


def test_cancelling_ends_it_and_the_next_one_goes_on(llm: LLM) -> None:
    async def work() -> None:
        server = AsyncLLM(llm)
        stream = server.stream(PROMPT, **LONG)
        first = await stream.__anext__()
        stream.cancel()
        stream.cancel()
        await stream.ended()
        assert [chunk async for chunk in stream] == []
        assert stream.result.finish_reason == "cancelled"
        assert stream.result.token_ids[:1] == first.token_ids
        assert len(stream.result.token_ids) < 200
        assert (await server.generate(PROMPT, max_tokens=3)).finish_reason == "length"

    run(work())


def test_one_that_waits_for_its_turn_can_be_cancelled(llm: LLM) -> None:
    async def work() -> None:
        server = AsyncLLM(llm)
        running, waiting = server.stream(PROMPT, **LONG), server.stream(PROMPT, **LONG)
        await running.__anext__()
        await waiting.started()
        waiting.cancel()
        await waiting.ended()
        running.cancel()
        await running.ended()

    run(work())


def test_one_that_never_began_is_cancelled_too(llm: LLM) -> None:
    async def work() -> None:
        stream = AsyncLLM(llm).stream(PROMPT)
        stream.cancel()
        await stream.ended()
        assert [chunk async for chunk in stream] == []

    run(work())


def test_a_task_that_is_cancelled_ends_its_generation(llm: LLM) -> None:
    async def work() -> None:
        server = AsyncLLM(llm)
        task = asyncio.create_task(server.generate(PROMPT, max_tokens=480, ignore_eos=True))
        while not llm.stats.sequences_running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while llm.stats.sequences_running:
            await asyncio.sleep(0.01)

    run(work())


def test_a_task_that_is_cancelled_while_it_waits_for_a_chunk_ends_its_generation(llm: LLM) -> None:
    """Without `async with`, as the async generators of other engines."""

    async def work() -> None:
        stream = AsyncLLM(llm).stream(PROMPT, **LONG)

        async def read() -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(read())
        while not stream.has_begun:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.ended()
        assert stream.is_cancelled
        assert llm.stats.sequences_running == 0

    run(work())


def test_a_loop_that_ends_harms_nobody(llm: LLM) -> None:
    async def work() -> None:
        await AsyncLLM(llm).stream(PROMPT, **LONG).__anext__()

    run(work())
    assert llm.generate(PROMPT, max_tokens=3).finish_reason == "length"


def test_loading_leaves_the_loop_running(tmp_path) -> None:
    """Callbacks of the loop run while a thread loads, and leaving the block closes the model."""
    target = save_model(tmp_path, seed=0)
    n_ticks = 0

    async def tick() -> None:
        nonlocal n_ticks
        while True:
            await asyncio.sleep(0.001)
            n_ticks += 1

    async def work() -> AsyncLLM:
        ticking = asyncio.create_task(tick())
        async with await AsyncLLM.load(target, ctx_size=64, threads=1) as loaded:
            assert n_ticks > 0
            ticking.cancel()
            assert "AsyncLLM of <specdec.LLM" in repr(loaded)
            assert len((await loaded.generate(PROMPT, max_tokens=3)).token_ids) == 3
        return loaded

    loaded = run(work())
    assert "closed" in repr(loaded)
    with pytest.raises(ModelClosed):
        loaded.llm.generate(PROMPT)


def test_a_model_whose_loading_was_cancelled_is_closed(tmp_path, monkeypatch) -> None:
    target = save_model(tmp_path, seed=0)
    loaded, may_load = [], threading.Event()

    def slow_load(*arguments: Any, **options: Any) -> LLM:
        may_load.wait(60)
        loaded.append(specdec.load(*arguments, **options))
        return loaded[0]

    monkeypatch.setattr("specdec.async_llm.load", slow_load)

    async def work() -> None:
        loading = asyncio.create_task(AsyncLLM.load(target, ctx_size=64, threads=1))
        await asyncio.sleep(0.01)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        may_load.set()
        while not loaded or loaded[0].session.is_open:
            await asyncio.sleep(0.01)

    run(work())


def test_errors_of_loading_are_raised(tmp_path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'memory_budget'"):
        run(AsyncLLM.load(tmp_path, memory_budjet="1GiB"))
