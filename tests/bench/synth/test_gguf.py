"""A grown GGUF file computes, in llama.cpp, the logits of the small one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from grown_models import altered, save_source_with_tokenizer

from bench.synth import files as synth_files
from bench.synth.gguf import grow_gguf
from bench.synth.shapes import LlamaShape, SynthError

gguf = pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.gguf

SMALL = LlamaShape(64, 96, 2, 4, 2, 32, 280, tied=False)
LARGE = LlamaShape(768, 160, 5, 12, 6, 32, 331, tied=False)
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 3, 2, 38, 264, 271]

CASES = {
    "wider": altered(SMALL, hidden_size=128),
    "more layers": altered(SMALL, n_layers=7),
    "larger mlp": altered(SMALL, intermediate_size=256),
    "grouped to one head per key": altered(LARGE, n_heads=8, n_kv_heads=8),
    "grouped to larger groups": altered(LARGE, n_heads=16, n_kv_heads=2),
    "padded vocabulary": altered(SMALL, vocab_size=331),
    "everything": LARGE,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source_with_tokenizer(tmp_path_factory.mktemp("small"), SMALL)


def logits_of(path: Path) -> np.ndarray:
    from gguf_logits import gguf_logits

    return gguf_logits(path, IDS)[:, : SMALL.vocab_size]


def hf_logits_of(folder: Path) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


def ungrown(source: Path, tmp_path: Path, dtype: str, **changes: object) -> np.ndarray:
    """Logits of the unchanged source, written in the same types."""
    path = tmp_path / "small.gguf"
    grow_gguf(source, path, altered(SMALL, **changes), dtype=dtype)
    return logits_of(path)


@pytest.mark.parametrize("dtype", ["fp32", "f16", "bf16"])
def test_a_written_source_computes_what_transformers_computes(
    source: Path, tmp_path: Path, dtype: str
) -> None:
    expected = hf_logits_of(source)
    tolerance = {"fp32": 1e-4, "f16": 1e-2, "bf16": 1e-1}[dtype]
    assert expected.std() > 0.1  # otherwise equality would say little
    np.testing.assert_allclose(
        ungrown(source, tmp_path, dtype), expected, atol=tolerance * expected.std()
    )


@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", ["fp32", "f16"])
def test_grown_logits_equal_the_small_models(
    source: Path, tmp_path: Path, shape: LlamaShape, dtype: str
) -> None:
    expected = ungrown(source, tmp_path, dtype)
    report = grow_gguf(source, tmp_path / "grown.gguf", shape, dtype=dtype)
    # In F16 llama.cpp also rounds the activations, after norms that differ in the last bit.
    tolerance = 1e-3 if dtype == "fp32" else 1e-2
    np.testing.assert_allclose(logits_of(report.path), expected, atol=tolerance * expected.std())


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
@pytest.mark.parametrize("shape", [CASES["wider"], LARGE], ids=["head in Q8_0", "head in Q6_K"])
def test_quantised_logits_are_nearly_the_small_models(
    source: Path, tmp_path: Path, shape: LlamaShape, dtype: str
) -> None:
    expected = ungrown(source, tmp_path, dtype)
    got = logits_of(grow_gguf(source, tmp_path / "grown.gguf", shape, dtype=dtype).path)
    error = np.abs(got - expected).max()
    assert error < 0.15 * expected.std()
    top = np.sort(expected, axis=1)
    sure = top[:, -1] - top[:, -2] > 2 * error
    assert sure.sum() > len(IDS) // 3
    assert (got.argmax(1) == expected.argmax(1))[sure].all()


@pytest.mark.parametrize("dtype", ["fp32", "q4_0"])
def test_a_tied_head_stays_tied_where_it_is_possible(tmp_path: Path, dtype: str) -> None:
    small = save_source_with_tokenizer(tmp_path / "small", altered(SMALL, tied=True))
    # At this width the head, also the embedding, has the small model's type.
    large = altered(LARGE, hidden_size=288, tied=True)
    report = grow_gguf(small, tmp_path / "grown.gguf", large, dtype=dtype)
    names = {tensor.name for tensor in gguf.GGUFReader(report.path).tensors}
    assert "output.weight" not in names
    expected = ungrown(small, tmp_path, dtype, tied=True)
    error = np.abs(logits_of(report.path) - expected).max()
    assert error < (1e-3 if dtype == "fp32" else 0.15) * expected.std()


def test_the_file_holds_what_the_report_says(source: Path, tmp_path: Path) -> None:
    report = grow_gguf(source, tmp_path / "grown.gguf", LARGE, dtype="q4_0")
    reader = gguf.GGUFReader(report.path)
    assert sum(tensor.n_bytes for tensor in reader.tensors) == report.n_bytes
    assert all(tensor.data_offset % 32 == 0 for tensor in reader.tensors)
    size = report.path.stat().st_size
    assert report.n_bytes < size < report.n_bytes + 40_000  # header, vocabulary, padding
    description = reader.fields["general.description"].contents()
    assert "not** a trained large model" in description


def test_padding_tokens_have_no_text_and_come_from_no_text(source: Path, tmp_path: Path) -> None:
    from specdec.text.gguf_tokenizer import GgufTokenizer

    path = grow_gguf(source, tmp_path / "grown.gguf", LARGE, dtype="q8_0").path
    small = grow_gguf(source, tmp_path / "small.gguf", SMALL, dtype="q8_0").path
    with GgufTokenizer(path) as grown, GgufTokenizer(small) as plain:
        assert grown.n_tokens == plain.n_tokens <= SMALL.vocab_size
        assert grown.vocabulary().tokens == plain.vocabulary().tokens
        assert (grown.vocabulary().num_tokens, plain.vocabulary().num_tokens) == (331, 280)
        text = "def main(): [PAD300] [PAD290][PAD330]"
        assert grown.encode(text) == plain.encode(text)
        assert grown.decode(grown.encode(text)) == text
        assert grown.decode([300, 330]) == ""


def test_the_seed_decides_every_byte(source: Path, tmp_path: Path) -> None:
    def content(name: str, seed: int) -> bytes:
        return grow_gguf(source, tmp_path / name, LARGE, seed=seed).path.read_bytes()

    first = content("a.gguf", 1)
    assert first == content("b.gguf", 1)
    assert first != content("c.gguf", 2)


@pytest.mark.parametrize(
    ("changes", "dtype", "message"),
    [
        ({"hidden_size": 32, "n_heads": 4, "n_kv_heads": 2}, "f16", "hidden size 64 > 32"),
        ({}, "q5_0", "known: q4_0, q4_k_s, q4_k_m, .*, q8_0, f16, bf16, fp32"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    source: Path, tmp_path: Path, changes: dict[str, int], dtype: str, message: str
) -> None:
    with pytest.raises(SynthError, match=message):
        grow_gguf(source, tmp_path / "grown.gguf", altered(LARGE, **changes), dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_heads_share_blocks_where_zeros_beside_them_stay_zeros(tmp_path: Path) -> None:
    small = altered(SMALL, head_dim=16)
    folder = save_source_with_tokenizer(tmp_path / "small", small)
    large = altered(small, hidden_size=256, n_heads=16, n_kv_heads=8)
    expected = ungrown(folder, tmp_path, "q8_0", head_dim=16)
    got = logits_of(grow_gguf(folder, tmp_path / "grown.gguf", large, dtype="q8_0").path)
    assert np.abs(got - expected).max() < 0.15 * expected.std()
    apart = save_source_with_tokenizer(tmp_path / "apart", altered(small, n_kv_heads=4))
    with pytest.raises(SynthError, match="do not fill groups of 32, .* exact in Q4_K; choose q4_0"):
        grow_gguf(apart, tmp_path / "grown-k.gguf", large, dtype="q4_k_m")


def test_destinations_are_spared(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SynthError, match=r"must end in \.gguf"):
        grow_gguf(source, tmp_path / "grown", SMALL)
    path = tmp_path / "grown.gguf"
    path.write_text("dear")
    with pytest.raises(SynthError, match="exists; choose another"):
        grow_gguf(source, path, SMALL)
    with pytest.raises(SynthError, match="no GGUF file"):
        grow_gguf(source, path, SMALL, force=True)
    path.write_bytes(b"GGUF, an old one")
    assert grow_gguf(source, path, SMALL, force=True).path.stat().st_size > 10_000
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_noticed_before_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(synth_files.shutil, "disk_usage", lambda path: usage(10, 10, 1024))
    with pytest.raises(SynthError, match=r"needed, 1\.00 KiB free"):
        grow_gguf(source, tmp_path / "grown.gguf", LARGE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError(28, "No space left on device"), SynthError), (KeyboardInterrupt(), BaseException)],
)
def test_nothing_half_written_stays(
    source: Path, tmp_path: Path, error: BaseException, expected: type[BaseException]
) -> None:
    def fail(n_bytes: int, total: int) -> None:
        if n_bytes > total / 2:
            raise error

    with pytest.raises(expected):
        grow_gguf(source, tmp_path / "grown.gguf", LARGE, progress=fail)
    assert list(tmp_path.iterdir()) == []
