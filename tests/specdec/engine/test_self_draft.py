"""The target as its own draft: shared weights, its own KV cache, a window of the context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from alone import own
from forced_streaming import force_streaming
from gguf_models import save_tiny_gguf
from tiny_pair import save_model

import specdec
from backends.contract.backend import Backend, BackendError
from backends.gguf.model import load_gguf_model
from backends.hf.backend import TorchBackend
from backends.llama.backend import LlamaBackend
from specdec.checks import ConfigError

OPTIONS = {
    "ctx_size": 200,
    "num_draft_tokens": 4,
    "draft_depth": 4,
    "tree_width": 1,
    "spec_type": "draft",
}
PROMPT = list(range(10, 70))


@pytest.fixture(scope="module", params=["torch", pytest.param("gguf", marks=pytest.mark.gguf)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "torch":
        return save_model(folder, seed=0)
    pytest.importorskip("llama_cpp")
    return save_tiny_gguf("llama", folder / "model.gguf")


@pytest.fixture
def backend(model: Path) -> Iterator[Backend]:
    if model.is_dir():
        loaded: Backend = TorchBackend.resident(model, max_context=128)
    else:
        options = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": False}
        loaded = LlamaBackend(
            load_gguf_model(model), max_context=128, n_threads=1, load_mode="mmap", **options
        )
    with loaded:
        yield loaded


def test_siblings_keep_apart(backend: Backend) -> None:
    with backend.with_shared_weights(max_context=64, max_nodes=8, max_num_tokens=8) as sibling:
        assert sibling.max_context == 64
        other = sibling.new_sequence()
        expected = own(backend).prefill(PROMPT)
        other.prefill([5, 6, 7])
        ids, rows = other.extend([8, 9], [-1, -1])
        assert list(own(backend).committed_ids) == PROMPT
        assert list(other.committed_ids) == [5, 6, 7]
        own(backend).rollback(0)
        assert np.abs(own(backend).prefill([5, 6, 7, 9]) - rows[1]).max() < 1e-4
        other.commit([ids[0]])
        assert list(other.committed_ids) == [5, 6, 7, 8]
    own(backend).rollback(0)
    assert np.array_equal(own(backend).prefill(PROMPT), expected)
    with pytest.raises(BackendError, match="closed"):
        other.prefill([1])


def test_siblings_in_two_threads(backend: Backend) -> None:
    expected = own(backend).prefill(PROMPT)
    with backend.with_shared_weights(max_context=64, max_nodes=8, max_num_tokens=8) as other:
        actual: list[np.ndarray] = []

        def work(item: Backend) -> None:
            for _ in range(10):
                own(item).rollback(0)
                actual.append(own(item).prefill(PROMPT))

        threads = [threading.Thread(target=work, args=(item,)) for item in (backend, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(actual) == 20
    assert all(np.array_equal(item, expected) for item in actual)


@pytest.mark.slow_except(1)
def test_a_window_over_the_whole_sequence_is_always_right(model: Path) -> None:
    with specdec.load(model, "self:window=180", **OPTIONS) as llm:
        result = llm.generate(PROMPT, max_tokens=60, ignore_eos=True)
        plain = llm.generate(PROMPT, max_tokens=60, ignore_eos=True, speculative=False)
        assert result.token_ids == plain.token_ids
        assert result.stats.accepted_tokens == result.stats.drafted_tokens > 40


@pytest.mark.slow
def test_with_a_short_window_the_output_is_the_same(model: Path) -> None:
    with specdec.load(model, "self:window=16", **OPTIONS) as llm:
        result = llm.generate(PROMPT, max_tokens=60, ignore_eos=True)
        plain = llm.generate(PROMPT, max_tokens=60, ignore_eos=True, speculative=False)
        assert result.token_ids == plain.token_ids
        assert result.stats.drafted_tokens > 0
        assert llm.session.models.draft_prefix_cache.cached[-1].n_committed <= 4 + 16 + 4


def test_it_is_planned_without_weights(model: Path) -> None:
    parts = dict(specdec.plan_run(model, "self:window=16", **OPTIONS).parts)
    assert parts["draft KV cache"] > 0
    assert not any(parts.get(name) for name in ("draft pinned layers", "draft ring"))
    assert parts["draft embeddings and head"] == 0


def test_a_target_that_streams_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force_streaming(monkeypatch)
    with pytest.raises(ConfigError, match="read once for each level of a tree"):
        specdec.load(model, "self:window=16", **OPTIONS)


@pytest.mark.parametrize("name", ["self:", "self:window=", "self:window=x", "self:window=-3"])
def test_bad_names(model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="self:window=N"):
        specdec.plan_run(model, name)


def test_bad_windows(model: Path) -> None:
    with pytest.raises(ConfigError, match="draft_window is 3, must be an integer at least 16"):
        specdec.plan_run(model, "self:window=3")
    with pytest.raises(ConfigError, match="leave out draft_window"):
        specdec.plan_run(model, "self:window=64", draft_window=32)
