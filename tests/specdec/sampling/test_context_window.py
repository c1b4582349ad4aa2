"""The draft sees a window of the context, the target all of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from alone import own
from gguf_models import save_tiny_gguf
from hypothesis import given
from hypothesis import strategies as st
from tiny_pair import save_model

import specdec
from specdec.checks import ConfigError
from specdec.sampling.context_window import N_SINKS, ContextWindow, draft_context_size

OPTIONS = {"ctx_size": 256, "num_draft_tokens": 8, "draft_depth": 4, "spec_type": "draft"}
LONG = {"max_tokens": 200, "ignore_eos": True, "repetition_penalty": 1.3}


@given(n_recent=st.integers(1, 40), n_tokens=st.integers(1, 300))
def test_the_view(n_recent: int, n_tokens: int) -> None:
    context = list(range(n_tokens))
    view = ContextWindow(n_recent).view(context)
    assert view[:N_SINKS] == context[:N_SINKS]
    assert view[-1] == context[-1]
    n_shown = len(view) - N_SINKS
    assert n_shown <= n_recent
    assert view[N_SINKS:] == (context[-n_shown:] if n_shown > 0 else [])
    if n_tokens > N_SINKS + n_recent:
        assert n_shown > n_recent - max(1, n_recent // 2)
    else:
        assert view == context


@given(n_recent=st.integers(2, 40), n_tokens=st.integers(50, 200))
def test_each_token_is_computed_about_twice(n_recent: int, n_tokens: int) -> None:
    """The window grows by the new token, or restarts half a window after the last time."""
    window, before, num_tokens, n_jumps = ContextWindow(n_recent), [], 0, 0
    for n in range(1, n_tokens + 1):
        view = window.view(range(n))
        is_jump = view[:-1] != before
        num_tokens += len(view) - N_SINKS if is_jump else 1
        n_jumps += is_jump
        before = view
    step = n_recent // 2
    assert n_jumps <= n_tokens / step
    assert num_tokens <= n_tokens + n_jumps * (n_recent - step + 1) + N_SINKS


@given(
    requested=st.none() | st.integers(16, 600),
    draft_max=st.integers(40, 600),
    ctx_size=st.integers(40, 600),
    n_nodes=st.integers(1, 300),
)
def test_it_fits_the_drafts_cache(
    requested: int | None, draft_max: int, ctx_size: int, n_nodes: int
) -> None:
    capacity = draft_context_size(requested, ctx_size, draft_max, n_nodes)
    window = ContextWindow.fitting(requested, capacity, ctx_size, n_nodes)
    assert capacity <= min(ctx_size, draft_max)
    longest = max(len(window.view(range(n))) for n in range(1, ctx_size + 1))
    assert longest <= capacity
    if requested is not None and capacity < min(ctx_size, draft_max):
        assert window.n_recent == requested
    if window.n_recent is None:
        assert capacity == ctx_size
    else:
        assert longest < ctx_size
        assert longest < capacity or n_nodes == 0 or capacity == ctx_size


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("draft"), seed=0, num_hidden_layers=1)


@pytest.mark.slow
def test_a_windowed_draft_leaves_the_output_alone(target: Path, draft: Path) -> None:
    with specdec.load(target, draft, draft_window=16, **OPTIONS) as llm:
        assert llm.draft is not None
        pinned = []
        run = llm.draft.forward

        def record(batch):
            scores = run(batch)
            pinned.extend(
                (len(item.token_ids), item.kv.n_committed) for item in batch if item.parents is None
            )
            return scores

        llm.draft.forward = record  # type: ignore[method-assign]
        result = llm.generate("def f(x):", **LONG)
        plain = llm.generate("def f(x):", speculative=False, **LONG)
    assert result.token_ids == plain.token_ids
    assert result.stats.drafted_tokens > 0
    assert max(num_pinned for _, num_pinned in pinned) <= N_SINKS + 16
    assert sum(n_run for n_run, _ in pinned) < 3 * len(result.token_ids)


@pytest.mark.slow
def test_a_window_as_long_as_the_sequence_changes_nothing(target: Path, draft: Path) -> None:
    results = []
    for window in (None, 250):
        with specdec.load(target, draft, draft_window=window, **OPTIONS) as llm:
            assert llm.session.models.draft_window.n_recent in (None, 250)
            results.append(llm.generate("def f(x):", **LONG))
    counts = {(r.token_ids, r.stats.accepted_tokens, r.stats.drafted_tokens) for r in results}
    assert len(counts) == 1


def drafted_after(llm: specdec.api.LLM, n_tokens: int) -> int:
    """Return the draft tokens of a sequence that is already longer than `n_tokens`."""
    prompt = list(range(10, 80)) * 4
    assert len(prompt) > n_tokens
    return llm.generate(
        prompt[: n_tokens + 20], max_tokens=16, ignore_eos=True
    ).stats.drafted_tokens


def test_a_draft_with_a_shorter_context_serves_a_longer_sequence(
    target: Path, tmp_path: Path
) -> None:
    short = save_model(tmp_path, seed=0, num_hidden_layers=1, max_position_embeddings=64)
    with specdec.load(target, short, **OPTIONS) as llm:
        assert drafted_after(llm, 64) > 0
        assert llm.draft is not None
        assert own(llm.draft).n_committed <= 64


@pytest.mark.gguf
def test_on_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    model = save_tiny_gguf("llama", tmp_path / "model.gguf")
    prompt = list(range(3, 90)) * 2
    options = {"max_tokens": 40, "ignore_eos": True}
    with specdec.load(model, model, draft_window=16, **{**OPTIONS, "num_draft_tokens": 4}) as llm:
        result = llm.generate(prompt, **options)
        assert llm.draft is not None
        assert own(llm.draft).n_committed <= N_SINKS + 16 + 4
        assert result.stats.drafted_tokens > 0
        assert result.token_ids == llm.generate(prompt, speculative=False, **options).token_ids


@pytest.mark.slow
def test_the_plan_counts_the_window_only(target: Path, draft: Path) -> None:
    def kv_bytes(ctx_size: int, **options: int) -> int:
        sizes = {"ctx_size": ctx_size, "kv_tokens": ctx_size}
        plan = specdec.plan_run(target, draft, **{**OPTIONS, **sizes}, **options)
        return dict(plan.parts)["draft KV cache"]

    assert kv_bytes(8192, draft_window=64) == kv_bytes(4096, draft_window=64) < kv_bytes(4096) / 4


@pytest.mark.parametrize("window", [0, 15, -1, 2.5])
def test_bad_windows(target: Path, draft: Path, window: object) -> None:
    with pytest.raises(ConfigError, match="draft_window is .*, must be an integer at least 16"):
        specdec.plan_run(target, draft, draft_window=window)


def test_a_call_cannot_change_the_window_of_a_loaded_draft(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=1)
    with specdec.load(model, model, draft_window=32, **OPTIONS) as llm:
        other = dataclasses.replace(llm.spec, draft_window=None)
        with pytest.raises(ConfigError, match="draft_window is None, .* loaded with 32"):
            llm.generate("a", spec=other)
