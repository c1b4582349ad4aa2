"""A packed copy equals its source to the bit, and is a model like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from forced_streaming import force_streaming
from packed_models import change_tensors, logits, save_packable
from safetensors.torch import load_file, save_file

from backends.contract.source import BackendOptions
from backends.hf.source import HfSource
from backends.packed.decoder import Decoder
from backends.packed.twelve_bits import TwelveBits
from offload.formats.checkpoint import WeightIndex
from specdec import load
from specdec.packing.pack import pack
from specdec.pair import pair_path

FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "gpt-neox", "gpt2", "minicpm3")


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_equal_in_every_bit(family: str, tmp_path: Path) -> None:
    plain = save_packable(family, tmp_path / "plain")
    report = pack(plain, tmp_path / "packed")
    assert report.n_packed >= 6
    assert report.n_bytes < report.source_bytes
    expected = logits(plain, is_streamed=False)
    for is_streamed in (False, True):
        actual = logits(tmp_path / "packed", is_streamed)
        for item, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(item, other, atol=0.03 * float(np.abs(other).max()))


def test_a_copy_computes_in_the_number_format_of_its_source(tmp_path: Path) -> None:
    """F32 embeddings take fewer bytes than the plain bf16 matrices, more than the packed."""
    plain = save_packable("llama", tmp_path / "plain", vocab_size=390)
    change_tensors(plain, lambda name, x: x if "layers" in name else x.float())
    pack(plain, tmp_path / "packed")
    num_non_layer, n_plain, n_packed = (
        sum(r.n_bytes for r in WeightIndex.from_directory(path).values() if r.dtype == dtype)
        for path, dtype in ((plain, "F32"), (plain, "BF16"), (tmp_path / "packed", "BF16"))
    )
    assert n_packed < num_non_layer < n_plain
    expected = logits(plain, is_streamed=False)
    for item, other in zip(logits(tmp_path / "packed", False), expected, strict=True):
        # Sums in another order, rounded to bf16 in each layer.
        np.testing.assert_allclose(item, other, atol=0.03 * float(np.abs(other).max()))


@pytest.mark.slow
def test_a_packed_model_is_a_model_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded target streams: output, session and fingerprint are compared."""
    report = pack(pair_path("pair:target"), tmp_path / "packed")
    assert report.n_bytes < 0.79 * report.source_bytes
    assert not report.not_packed
    sequences = []
    for model in ("pair:target", tmp_path / "packed"):
        with monkeypatch.context() as patch:
            force_streaming(patch)
            with load(str(model), draft_model="pair:draft", memory_budget="2GiB") as llm:
                sequences.append(llm.generate("def add(a, b):", max_tokens=24).text)
    assert sequences[0] == sequences[1]
    plain, packed = (HfSource(p, BackendOptions()) for p in (pair_path("pair:target"), report.path))
    assert plain.fingerprint() != packed.fingerprint()


def test_embeddings_norms_and_small_tensors_stay(tmp_path: Path) -> None:
    pack(save_packable("llama", tmp_path / "plain"), tmp_path / "packed")
    plain, packed = (WeightIndex.from_directory(tmp_path / name) for name in ("plain", "packed"))
    assert list(plain) == list(packed)
    for name, record in packed.items():
        is_matrix = "layers" in name and "norm" not in name
        assert record.scheme == ("BF16_12" if is_matrix else "")
        assert (record.dtype, record.shape) == (plain[name].dtype, plain[name].shape)
        assert is_matrix or record.n_bytes == plain[name].n_bytes


def test_matrices_of_too_many_exponents_stay_as_they_are(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    name = "model.layers.1.mlp.up_proj.weight"
    (path,) = (path for path in plain.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(path)
    bits = torch.randint(-(2**15), 2**15, tensors[name].shape, dtype=torch.int16)
    tensors[name] = bits.view(torch.bfloat16)  # NaN and infinity among them
    save_file(tensors, path)
    report = pack(plain, tmp_path / "packed")
    assert list(report.not_packed) == [name]
    assert 0.9 < report.not_packed[name] < 0.96
    assert f"{name} stays bf16: 9" in "\n".join(report.lines())
    record = WeightIndex.from_directory(tmp_path / "packed")[name]
    assert record.scheme == ""
    (copy,) = (p for p in (tmp_path / "packed").glob("*.safetensors") if name in load_file(p))
    assert torch.equal(load_file(copy)[name].view(torch.int16), bits)


def test_exponents_that_no_sample_has_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a tensor is written unpacked, though packing had begun."""
    from backends.packed import writer

    monkeypatch.setattr(writer, "_SAMPLES", 1)
    monkeypatch.setattr(writer, "_SAMPLE_WEIGHTS", 1024)
    monkeypatch.setattr(TwelveBits, "piece_weights", 1024)
    plain = save_packable("llama", tmp_path / "plain")
    name = "model.layers.1.mlp.up_proj.weight"
    (path,) = (path for path in plain.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(path)
    tensors[name].view(-1)[1024:] = torch.logspace(-30, 30, 7168).to(torch.bfloat16)
    save_file(tensors, path)
    report = pack(plain, tmp_path / "packed")
    assert list(report.not_packed) == [name]
    (copy,) = (p for p in (tmp_path / "packed").glob("*.safetensors") if name in load_file(p))
    assert torch.equal(load_file(copy)[name], tensors[name])


def test_the_plan_knows_packed_sizes_and_the_buffer(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    pack(plain, tmp_path / "packed")
    own, other = (HfSource(tmp_path / name, BackendOptions()) for name in ("packed", "plain"))
    n_own, n_other = (sum(layer.n_bytes for layer in item.layers) for item in (own, other))
    assert n_own < 0.8 * n_other
    decoding = Decoder(own.model.packed_modules, 1)
    try:
        n_threads = own._n_threads
        assert decoding.n_bytes <= own.model.decode_buffer_bytes(1)
        n_bytes = own.model.decode_buffer_bytes(n_threads)
        assert own.non_layer_bytes - other.non_layer_bytes == n_bytes
    finally:
        decoding.close()
    assert own.can_use_gpu


def test_products_of_packed_matrices_count_as_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per stored byte; what is not packed, as norms, costs what it does in a plain model."""
    from backends.contract.curve import ComputeCurve
    from backends.hf import source as hf_source

    pack(save_packable("llama", tmp_path / "plain"), tmp_path / "packed")
    multiplying, packed = ComputeCurve.linear(3.0, 1.0), ComputeCurve.linear(5.0, 2.0)
    monkeypatch.setattr(hf_source, "is_small", lambda _: False)
    monkeypatch.setattr(hf_source, "measure_compute", lambda *_: multiplying)
    monkeypatch.setattr(hf_source, "measure_products", lambda *_, **__: packed)
    source = HfSource(tmp_path / "packed", BackendOptions())
    records = [bound.record for layer in source.model.layer_tensors for bound in layer]
    share = sum(r.n_bytes for r in records if r.scheme) / sum(r.n_bytes for r in records)
    assert 0.9 < share < 1
    compute = source.measure_compute()
    expected = share * packed.seconds(8) + (1 - share) * multiplying.seconds(8)
    assert compute.per_byte.seconds(8) == pytest.approx(expected)
    plain = HfSource(tmp_path / "plain", BackendOptions()).measure_compute()
    assert compute.non_layer_seconds(8) == plain.non_layer_seconds(8)


def test_packed_matrices_need_no_test_of_their_sums(tmp_path: Path) -> None:
    """Their order is the same for any number of rows (backends/tiles/products.py)."""
    from backends.hf.loading import load_hf_model
    from backends.hf.products import products_of

    pack(save_packable("llama", tmp_path / "plain", intermediate_size=168), tmp_path / "packed")
    for name, n_outputs in (("plain", {168}), ("packed", set())):
        actual = set(products_of(load_hf_model(tmp_path / name)))
        assert {item.n_out for item in actual if item.n_in == 64} & {168} == n_outputs
