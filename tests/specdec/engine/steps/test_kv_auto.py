"""Without an option, many sequences run at once; memory is shared between their KV and layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forced_streaming import force_streaming
from gguf_models import save_tiny_gguf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from stepping import Stepping
from tiny_pair import save_model

import specdec
from specdec.api import LLM
from specdec.planning.memory.pinnable import SEQUENCE_TOKENS
from specdec.policy import opportunistic_layers
from specdec.policy.kv_price import KvPrice
from specdec.run_options import DEFAULT_PARALLEL
from specdec.sampling.params import SamplingParams

WORDS = [[7 + (3 * i + k) % 70 for i in range(470)] for k in range(6)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@dataclass
class Memory:
    """A process whose memory is its base, KV of both models, and pinned layers."""

    llm: Any = None
    budget_bytes: int = 0
    base_bytes: int = 0
    peak_bytes: int = 0

    def use(self) -> int:
        if self.llm is None:
            return 0
        models = [self.llm.target] + ([self.llm.draft] if self.llm.draft is not None else [])
        kv_bytes = sum(model.kv_bytes for model in models)
        return self.base_bytes + kv_bytes + int(self.llm.target.pinned_bytes)

    def peak(self) -> int:
        return self.use()

    def check(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.use())
        assert self.use() <= self.budget_bytes


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Memory]]:
    """A streamed model in a budget that holds its layers or the KV of as many as may run."""
    with pytest.MonkeyPatch.context() as patch:
        force_streaming(patch)
        memory = Memory()
        patch.setattr(opportunistic_layers, "MIN_RELEASED_BYTES", 1)
        patch.setattr(opportunistic_layers, "recent_peak_rss", memory.peak)
        patch.setattr(KvPrice, "pays", lambda *_: True)  # this model's KV is as large as its layers
        target = save_model(tmp_path_factory.mktemp("target"), seed=0)
        with specdec.load(target, ctx_size=512, num_draft_tokens=0, threads=1) as llm:
            memory.llm = llm
            layers = llm.session.engine.opportunistic_layers
            llm.generate(WORDS[0][:20], params(2))
            pool: Any = llm.target
            memory.budget_bytes = (pool._pool.n_blocks - 15) * pool._pool.block_bytes
            # Of a block that sequences share in part, each gets a copy with its next token.
            patch.setattr(opportunistic_layers, "RESERVE_BYTES", 4 * pool._pool.block_bytes)
            layers._budget_bytes = layers._whole_bytes = memory.budget_bytes
            layers._activation_bytes = layers._draft_bytes = 0
            layers._bytes_per_token = 0.0
            step = llm.session.engine.step

            def checked(batch: Any) -> None:
                step(batch)
                memory.check()

            patch.setattr(llm.session.engine, "step", checked)
            yield llm, memory


@pytest.mark.parametrize("kind", ["checkpoint", pytest.param("gguf", marks=pytest.mark.gguf)])
def test_the_default_is_kv_for_all_sequences_that_may_run(kind: str, tmp_path: Path) -> None:
    if kind == "checkpoint":
        target = save_model(tmp_path / "target", seed=0)
    else:
        pytest.importorskip("llama_cpp")
        target = save_tiny_gguf("llama", tmp_path / "m.gguf")
    with specdec.load(target, ctx_size=128, threads=1) as llm:
        plan, tokens = llm.session.plan, DEFAULT_PARALLEL * SEQUENCE_TOKENS
        assert plan.kv_tokens == tokens == plan.to_dict()["kv_tokens"]
        with Stepping(llm) as stepping:
            streams = [llm.stream(WORDS[i % 6][i:110], params(8)) for i in range(20)]
            for stream in streams:
                stream._start()
            stepping.step(2)
            assert llm.stats.sequences_running == DEFAULT_PARALLEL
            assert llm.stats.sequences_waiting == 4
            stepping.free()
            results = [list(stream) and stream.result for stream in streams]
        assert llm.stats.preempted == 0
        assert llm.target.n_kv_allocated >= llm.target.kv_usage.n_used
        assert llm.target.kv_bytes <= dict(plan.parts)["target KV cache"]
        for i, result in enumerate(results):
            alone = llm.generate(WORDS[i % 6][i:110], params(8), speculative=False)
            assert result.token_ids == alone.token_ids


def test_kv_of_many_displaces_layers_and_gives_them_back(streamed: tuple[LLM, Memory]) -> None:
    llm, memory = streamed
    llm.generate(WORDS[0][:20], params(8))
    pinned = llm.target.pinned_bytes
    assert pinned > 0
    fewest: list[int] = []
    step = llm.session.engine.step

    def noted(batch: Any) -> None:
        step(batch)
        fewest.append(llm.target.pinned_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.session.engine, "step", noted)
        prompts = [[5 + i, *WORDS[i % 6]] for i in range(DEFAULT_PARALLEL)]
        llm.generate(prompts, params(20))
    assert min(fewest) < pinned
    peak_kv = memory.peak_bytes
    llm.generate(WORDS[0][:20], params(12))
    assert llm.target.pinned_bytes >= pinned
    assert llm.target.kv_bytes < peak_kv // 2, "KV that finished sequences left is given back"
    assert memory.peak_bytes <= memory.budget_bytes


REQUEST = st.tuples(st.integers(0, 5), st.integers(1, 200), st.integers(1, 40))


@pytest.mark.slow_except(1)
@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(requests=st.lists(st.tuples(st.integers(0, 4), REQUEST), min_size=1, max_size=24))
def test_any_arrivals_end_with_their_own_text_within_the_budget(
    streamed: tuple[LLM, Memory], requests: list[tuple[int, tuple[int, int, int]]]
) -> None:
    llm, memory = streamed
    # As in a plan, the whole cache fits: prefixes of finished sequences may fill it.
    pool: Any = llm.target
    memory.budget_bytes = pool._pool.n_blocks * pool._pool.block_bytes
    llm.session.engine.opportunistic_layers.set_budget(memory.budget_bytes)
    streams: list[Any] = []
    with Stepping(llm) as stepping:
        for num_steps, (word, length, max_tokens) in requests:
            stream = llm.stream(WORDS[word][:length], params(max_tokens))
            stream._start()
            streams.append(stream)
            if num_steps:
                stepping.step()
        stepping.free()
        results = [list(stream) and stream.result for stream in streams]
    for (_, (word, length, max_tokens)), result in zip(requests, results, strict=True):
        assert len(result.token_ids) == max_tokens
        alone = llm.generate(
            WORDS[word][:length], params(max_tokens), speculative=False, cache_prompt=False
        )
        assert result.token_ids == alone.token_ids
    assert not llm.stats.sequences_waiting
    assert memory.peak_bytes <= memory.budget_bytes


def test_one_line_says_what_lets_a_waiting_sequence_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = save_model(tmp_path / "target", seed=0)
    prompts = [[5 + i, *WORDS[i][:90]] for i in range(4)]
    with specdec.load(target, ctx_size=128, kv_tokens=128, num_draft_tokens=0, threads=1) as llm:
        llm.generate(prompts, params(8))
    (line,) = (r.getMessage() for r in caplog.records if "sequences wait" in r.getMessage())
    assert "the KV cache of 128 tokens has no capacity for one of 91 beside 1 that run" in line
    enough = int(line.split("--kv-tokens ")[1].split()[0])
    caplog.clear()
    with specdec.load(target, ctx_size=128, kv_tokens=enough, num_draft_tokens=0, threads=1) as llm:
        llm.generate(prompts[:2], params(8))
    assert not [r for r in caplog.records if "sequences wait" in r.getMessage()]


def test_a_sequence_that_does_not_pay_waits_and_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    force_streaming(monkeypatch)
    monkeypatch.setattr(
        KvPrice, "pays", lambda self, cost, num_running, num_tokens: not num_running
    )
    target = save_model(tmp_path / "target", seed=0)
    with specdec.load(target, ctx_size=256, num_draft_tokens=0, threads=1) as llm:
        running: list[int] = []
        step = llm.session.engine.step

        def noted(batch: Any) -> None:
            running.append(len(batch.sequences))
            step(batch)

        monkeypatch.setattr(llm.session.engine, "step", noted)
        results = llm.generate([word[:40] for word in WORDS], params(6))
        assert max(running) == 1
        assert all(len(result.token_ids) == 6 for result in results)
    (line,) = (r.getMessage() for r in caplog.records if "sequences wait" in r.getMessage())
    assert "more of --memory-budget let it in" in line
