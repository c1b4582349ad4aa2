"""Small models are timed as a whole; large ones by products in each of their number formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alone import own
from fake_gpu import install_fake_gpu
from gguf_models import save_tiny_gguf

from backends.contract.curve import ComputeCurve
from backends.contract.sequence import SequenceInput
from backends.contract.source import BackendOptions, Loading, ModelCompute, ModelSource
from backends.cuda.source import HfGpuSource
from backends.hf.source import HfSource
from backends.llama import source as gguf_source
from backends.timing.passes import is_small
from offload.placement.plan import plan_placement


def hf_source(checkpoint_factory: Callable[..., Path], _: Path) -> ModelSource:
    return HfSource(checkpoint_factory("llama"), BackendOptions())


def gguf_source_of(_: Any, tmp_path: Path) -> ModelSource:
    pytest.importorskip("llama_cpp")
    path = save_tiny_gguf("llama", tmp_path / "m.gguf")
    return gguf_source.GgufSource(path, BackendOptions(n_threads=1))


@pytest.fixture(
    params=[
        pytest.param(hf_source, id="torch"),
        pytest.param(gguf_source_of, id="gguf", marks=pytest.mark.gguf),
    ]
)
def source(request: Any, checkpoint_factory: Callable[..., Path], tmp_path: Path) -> ModelSource:
    actual: ModelSource = request.param(checkpoint_factory, tmp_path)
    return actual


def logits(source: ModelSource) -> np.ndarray:
    placement = plan_placement(source.layers, 1 << 40)
    with source.load(Loading(placement, 16, 8, 8, load_mode="ram")) as backend:
        return own(backend).prefill([3, 17, 5])


def layer_bytes(source: ModelSource) -> int:
    return sum(record.n_bytes for layer in source.layers for record in layer.tensors)


def test_a_small_models_own_passes_are_timed(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock moves with passes only: everything else takes no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    now = 0.0
    load = type(source).load

    def loaded(self: ModelSource, loading: Loading) -> Any:
        backend = load(self, loading)
        forward = backend.forward

        def timed(batch: list[SequenceInput]) -> Any:
            nonlocal now
            now += 0.5 + 0.25 * sum(len(added.token_ids) for added in batch)
            return forward(batch)

        monkeypatch.setattr(backend, "forward", timed)
        return backend

    before = logits(source)
    monkeypatch.setattr(type(source), "load", loaded)
    monkeypatch.setattr("backends.timing.measure.time.perf_counter", lambda: now)
    compute = source.measure_compute()
    monkeypatch.undo()
    assert is_small(source)
    for num_tokens in (1, 5, 32, 100):
        seconds = compute.per_byte.seconds(num_tokens) * layer_bytes(source)
        seconds += compute.non_layer_seconds(num_tokens)
        assert seconds == pytest.approx(0.5 + 0.25 * num_tokens)
    assert compute.per_byte.beside_factor(4) == 1.0
    assert np.array_equal(logits(source), before)  # it still loads as usual


def test_models_of_one_shape_are_timed_once(
    checkpoint_factory: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = HfSource(checkpoint_factory("llama"), BackendOptions()).measure_compute()
    monkeypatch.setattr(HfSource, "load", None)
    again = HfSource(checkpoint_factory("llama", seed=1), BackendOptions()).measure_compute()
    assert again == first


def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds per byte of a format: its number."""

    def measure(kind: int, n_threads: int, reading: Path | None) -> ComputeCurve:
        return ComputeCurve((1, 2), (kind, 2 * kind), (kind, 3 * kind))

    monkeypatch.setattr(gguf_source, "measure_ggml_compute", measure)
    monkeypatch.setattr(gguf_source, "is_small", lambda _: False)
    monkeypatch.setattr(gguf_source, "_SAMPLE_SHARE", 1 << 60)  # no memory for a sample


@pytest.mark.gguf
def test_each_number_format_counts_by_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    curves(monkeypatch)
    path = save_tiny_gguf("llama", tmp_path / "m.gguf", dtype="Q8_0", hidden=64, feed_forward=64)
    source = gguf_source.GgufSource(path, BackendOptions(n_threads=1))
    compute = source.measure_compute(beside_reads=False)

    def expected(records: Any) -> float:
        matrices = [record for record in records if len(record.shape) > 1]
        seconds = sum(r.n_bytes * gguf_source._TYPE_IDS[r.dtype] for r in matrices)
        return seconds / sum(r.n_bytes for r in matrices)

    layers = expected(record for layer in source.layers for record in layer.tensors)
    head = expected(source.model.resident_non_layer_records)
    assert compute.per_byte.seconds(1) == pytest.approx(layers)
    assert compute.non_layer_seconds(2) == pytest.approx(2 * head * source.head_bytes)


def test_what_comes_after_the_layers() -> None:
    layers, head = ComputeCurve.linear(1.0, 0.0), ComputeCurve.linear(0.0, 2.0)
    assert ModelCompute(layers, 10).non_layer_seconds(7) == pytest.approx(10)
    item = ModelCompute(layers, 10, head_per_byte=head, per_pass=ComputeCurve.linear(0.5, 0.0))
    assert item.non_layer_seconds(3) == pytest.approx(60.5)
    assert item.times(2.0).non_layer_seconds(3) == pytest.approx(121)
    assert item.times(2.0).per_byte.seconds(9) == pytest.approx(2)


@pytest.mark.gguf
def test_a_product_may_be_timed_any_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computation takes about a megabyte of ggml buffer, which must be freed."""
    pytest.importorskip("llama_cpp")
    from backends.ggml import timing as ggml_compute

    monkeypatch.setattr(ggml_compute, "_ROWS", (1,))

    def measure(products: dict[int, Callable[[], object]], n_bytes: int, _: Any) -> ComputeCurve:
        for _ in range(400):
            products[1]()
        return ComputeCurve.linear(0.0, n_bytes)

    monkeypatch.setattr(ggml_compute, "measure_curve", measure)
    q8_0 = 8
    curve = ggml_compute._time_products(q8_0, 1, None)
    assert curve.seconds(1) == pytest.approx(4096 * 4096 / 32 * 34)


def test_a_small_model_on_a_gpu_is_timed_there(
    checkpoint_factory: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel launches take most of its passes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    install_fake_gpu(monkeypatch)
    seen: list[Loading] = []
    load = HfGpuSource.load

    def noted(self: HfGpuSource, loading: Loading) -> Any:
        seen.append(loading)
        return load(self, loading)

    monkeypatch.setattr(HfGpuSource, "load", noted)
    gpu = HfGpuSource(HfSource(checkpoint_factory("llama"), BackendOptions()))
    first, second = gpu.measure_compute(), gpu.measure_compute()
    (loading,) = seen  # timed once
    assert first.per_byte == second.per_byte
    assert first.per_byte.seconds(1) > 0
    assert loading.placement.is_on_device
    assert loading.placement.moved_bytes == 0
    assert loading.vram_bytes is None  # memory reserved for other models stays reserved
