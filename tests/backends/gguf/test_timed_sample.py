"""A few layers of a GGUF model without weights, timed in place of all layers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from alone import own
from gguf_bytes import make_file
from gguf_models import FAMILIES, save_tiny_gguf
from open_files import n_open_files

from backends.contract.sequence import SequenceInput
from backends.contract.source import BackendOptions, Loading
from backends.ggml.library import LlamaError
from backends.gguf.model import load_gguf_model
from backends.gguf.timed_sample import SAMPLED_ARCHITECTURES, sample_file, spread_layers
from backends.llama import source as gguf_source
from offload.formats.gguf_index import GgufIndex
from offload.placement.plan import plan_placement

pytestmark = pytest.mark.gguf
DENSE = [name for name, family in FAMILIES.items() if not family.n_experts]


@pytest.fixture(autouse=True)
def needs_llama_cpp() -> None:
    pytest.importorskip("llama_cpp")


def test_only_architectures_that_run_here_are_sampled() -> None:
    assert {FAMILIES[name].architecture for name in DENSE} == SAMPLED_ARCHITECTURES


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("layers", [(2,), (1, 3)])
@pytest.mark.parametrize("family", DENSE)
def test_llama_cpp_runs_a_sample_of_every_architecture(
    family: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    path = save_tiny_gguf(family, tmp_path / "m.gguf", n_layers=4, vocab=300)
    with sample_file(load_gguf_model(path), layers) as sample:
        source = gguf_source.GgufSource(sample, BackendOptions(n_threads=1))
        placement = plan_placement(source.layers, 1 << 40)
        with source.load(Loading(placement, 16, 4, 4, load_mode="mmap")) as backend:
            assert own(backend).prefill([3, 1, 2]).shape == (256,)


def test_its_layers_are_those_that_were_chosen(tmp_path: Path) -> None:
    path = save_tiny_gguf("llama", tmp_path / "m.gguf", n_layers=4, dtype="Q8_0", feed_forward=64)
    model = load_gguf_model(path)
    n_open = n_open_files()
    with sample_file(model, (2, 3)) as sample:
        actual = load_gguf_model(sample)
        for mine, expected in zip(actual.layers, (model.layers[2], model.layers[3]), strict=True):
            assert [(r.shape, r.dtype) for r in mine.tensors] == [
                (r.shape, r.dtype) for r in expected.tensors
            ]
        taken = os.stat(sample)
        assert taken.st_size >= sum(r.n_bytes for layer in actual.layers for r in layer.tensors)
        assert taken.st_blocks * 512 < 64 * 1024  # nothing but the header was written
    assert n_open_files() == n_open


def test_per_layer_metadata_is_cut_to_the_sample(tmp_path: Path) -> None:
    """Values keep their types: llama.cpp refuses a u32 where it expects an i32."""
    metadata: dict[str, tuple[str, Any]] = {
        "general.architecture": ("str", "llama"),
        "general.name": ("str", "whole"),
        "llama.block_count": ("u32", 4),
        "llama.embedding_length": ("u32", 32),
        "llama.context_length": ("u64", 512),
        "llama.attention.head_count": ("u32", 2),
        "llama.attention.head_count_kv": ("[i32]", [1, 2, 1, 2]),
        "llama.rope.sections": ("[i32]", [8, 8, 0]),
        "llama.attention.layer_norm_rms_epsilon": ("f32", 0.5),
        "tokenizer.ggml.tokens": ("[str]", [f"t{i}" for i in range(40)]),
    }
    tensors = {f"blk.{i}.attn_norm.weight": ("F32", [32]) for i in range(4)}
    tensors["token_embd.weight"] = ("F32", [40, 32])
    path = tmp_path / "m.gguf"
    path.write_bytes(make_file(metadata, tensors))
    expected: dict[str, tuple[str, Any]] = {
        "llama.block_count": ("u32", 2),
        "llama.vocab_size": ("u32", 40),
        "llama.context_length": ("u64", 512),
        "llama.attention.head_count_kv": ("arr[i32]", [2, 1]),
        "llama.rope.sections": ("arr[i32]", [8, 8, 0]),
        "llama.attention.layer_norm_rms_epsilon": ("f32", 0.5),
        "tokenizer.ggml.model": ("str", "no_vocab"),
    }
    with sample_file(load_gguf_model(path), (1, 2)) as sample:
        actual = GgufIndex.from_path(sample).metadata
        assert {key: (actual.type_name(key), actual[key]) for key in expected} == expected
        assert "tokenizer.ggml.tokens" not in actual


@pytest.mark.parametrize(
    ("share", "n_chosen"), [(0.0, 1), (0.01, 1), (0.25, 1), (0.3, 2), (0.5, 2), (1.0, 4), (9.0, 4)]
)
def test_as_many_layers_as_it_takes(share: float, n_chosen: int, tmp_path: Path) -> None:
    model = load_gguf_model(save_tiny_gguf("llama", tmp_path / "m.gguf", n_layers=4))
    n_bytes = sum(r.n_bytes for layer in model.layers for r in layer.tensors)
    chosen = spread_layers(model, int(share * n_bytes))
    assert len(set(chosen)) == n_chosen
    assert list(chosen) == sorted(chosen)


# --- planner input --------------------------------------------------------------------------------


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Large sources; products take 7 s per byte."""
    curve = gguf_source.ComputeCurve((1,), (7.0,), (7.0,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gguf_source, "is_small", lambda _: False)
    monkeypatch.setattr(gguf_source, "measure_ggml_compute", lambda *_: curve)

    def source(family: str = "llama") -> gguf_source.GgufSource:
        path = save_tiny_gguf(family, tmp_path / f"{family}.gguf")
        return gguf_source.GgufSource(path, BackendOptions(n_threads=1))

    return source


def test_layers_are_timed_as_llama_cpp_runs_them(timed: Any) -> None:
    compute = timed().measure_compute(beside_reads=False)
    assert compute.per_byte.num_tokens == gguf_source._SAMPLE_ROWS
    assert 0.0 < compute.per_byte.seconds(1) < 1.0
    assert compute.head_per_byte.seconds(1) == 7.0


def test_a_sample_stands_for_all_layers(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves with passes only: a pass of n rows takes n seconds per layer."""
    monkeypatch.setattr(gguf_source, "WEIGHT_BYTES", 1)
    source, now = timed(), 0.0
    load = gguf_source.GgufSource.load

    def loaded(self: gguf_source.GgufSource, loading: Loading) -> Any:
        backend = load(self, loading)
        forward = backend.forward

        def slow(batch: list[SequenceInput]) -> Any:
            nonlocal now
            now += sum(len(added.token_ids) for added in batch) * len(self.layers)
            return forward(batch)

        monkeypatch.setattr(backend, "forward", slow)
        return backend

    monkeypatch.setattr(gguf_source.GgufSource, "load", loaded)
    monkeypatch.setattr("backends.timing.measure.time.perf_counter", lambda: now)
    layer_bytes = sum(record.n_bytes for record in source.layers[0].tensors)
    head_bytes = 96 * 64 * 4  # float32; the sample counts it once
    per_byte = source.measure_compute(beside_reads=False).per_byte
    for num_tokens in (1, 5, 40):
        assert per_byte.seconds(num_tokens) * (layer_bytes + head_bytes) == pytest.approx(
            num_tokens, rel=0.01
        )


def test_experts_are_timed_by_their_products(timed: Any) -> None:
    assert timed("mixtral").measure_compute(beside_reads=False).per_byte.seconds(1) == 7.0


def test_layers_that_are_large_for_the_memory_are_timed_by_their_products(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = gguf_source.memory_limit()
    small = type(limit)(1 << 16, limit.source)
    monkeypatch.setattr(gguf_source, "memory_limit", lambda: small)
    assert timed().measure_compute(beside_reads=False).per_byte.seconds(1) == 7.0


def test_a_sample_that_llama_cpp_refuses_is_reported(
    timed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise LlamaError("llama.cpp cannot load it: why")

    monkeypatch.setattr(gguf_source, "measure_passes", refuse)
    assert timed().measure_compute(beside_reads=False).per_byte.seconds(1) == 7.0
    assert "predicted from single products: llama.cpp cannot load it: why" in caplog.text
