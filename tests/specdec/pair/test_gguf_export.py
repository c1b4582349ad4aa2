"""The embedded pair as GGUF: the same function, written once, never half."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specdec.pair import gguf_export, pair_path
from specdec.pair.gguf_export import PAIR_GGUF_NAMES, pair_gguf_path
from specdec.pair.gguf_file import GgufExportError, gguf_name
from specdec.pair.gguf_metadata import add_tokenizer

gguf = pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.gguf

TEXT = 'def area(r):\n    """The area of a circle."""\n    return math.pi * r ** 2\n\n\nclass A:\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specdec"


@pytest.mark.parametrize("name", PAIR_GGUF_NAMES)
def test_logits_equal_the_checkpoints(name: str, cache: Path) -> None:
    torch = pytest.importorskip("torch")
    from gguf_logits import gguf_logits
    from transformers import AutoModelForCausalLM

    from specdec.text.gguf_tokenizer import GgufTokenizer

    path = pair_gguf_path(name)
    with GgufTokenizer(path) as tokenizer:
        ids = tokenizer.encode(TEXT)
    folder = pair_path(name.removesuffix(".gguf"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(gguf_logits(path, ids), wanted, atol=1e-2 * wanted.std())


def test_a_file_is_written_once(cache: Path) -> None:
    path = pair_gguf_path("pair:draft.gguf")
    assert path.parent == cache
    before = path.stat()
    assert pair_gguf_path("pair:draft.gguf") == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [entry.name for entry in cache.iterdir()] == [path.name]


@pytest.mark.parametrize("changed", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_retrained_pair_is_exported_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    folder = shutil.copytree(pair_path("pair:draft"), tmp_path / "draft")
    monkeypatch.setattr(gguf_export, "pair_path", lambda name: folder)
    first = pair_gguf_path("pair:draft.gguf")
    data = bytearray((folder / changed).read_bytes())
    if changed.endswith(".json"):
        data += b"\n"
    else:
        data[-1] ^= 1
    (folder / changed).write_bytes(data)
    second = pair_gguf_path("pair:draft.gguf")
    assert second != first
    assert second.is_file()


def test_nothing_half_written_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: object) -> np.ndarray:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_export, "read_float32", fail)
    with pytest.raises(GgufExportError, match="No space left on device; set XDG_CACHE_HOME"):
        pair_gguf_path("pair:draft.gguf")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("name", ["pair:target", "pair:oracle.gguf", "target.gguf"])
def test_unknown_names_are_refused(name: str, cache: Path) -> None:
    with pytest.raises(ValueError, match=r"known: pair:target\.gguf, pair:draft\.gguf"):
        pair_gguf_path(name)
    assert not cache.exists()


def test_norms_are_f32_and_the_head_is_tied(cache: Path) -> None:
    reader = gguf.GGUFReader(pair_gguf_path("pair:target.gguf"))
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert "output.weight" not in types
    assert all((kind == "F32") == ("norm" in name) for name, kind in types.items())
    assert reader.fields["llama.attention.key_length"].contents() == 128
    assert reader.fields["tokenizer.ggml.pre"].contents() == "gpt-2"


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ('"add_prefix_space":false', '"add_prefix_space":true', "no space is put before"),
        ('"normalizer":null', '"normalizer":{"type":"NFC"}', "no normalizer"),
        ('"type":"BPE"', '"type":"Unigram"', "the model is BPE"),
        ('"ignore_merges":false', '"ignore_merges":true', "not looked up whole"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, old: str, new: str, rule: str) -> None:
    import json

    text = json.dumps(
        json.loads((pair_path("pair:target") / "tokenizer.json").read_text()),
        separators=(",", ":"),
    )
    assert old in text
    (tmp_path / "tokenizer.json").write_text(text.replace(old, new, 1))
    with pytest.raises(GgufExportError, match=rule):
        add_tokenizer(gguf.GGUFWriter(None, "llama"), tmp_path, 4096)


def test_strange_tensors_are_refused() -> None:
    assert gguf_name("model.layers.3.self_attn.q_proj.weight") == "blk.3.attn_q.weight"
    assert gguf_name("model.layers.3.self_attn.rotary_emb.inv_freq") is None
    expert = "model.layers.12.mlp.experts.7.down_proj.weight"
    assert gguf_name(expert) == "blk.12.ffn_down_exps.weight"
    for name in ("model.layers.0.mlp.shared_expert.up_proj.weight", "visual.proj.weight"):
        with pytest.raises(GgufExportError, match="no part of a plain Llama"):
            gguf_name(name)


def test_the_export_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "from specdec.pair.gguf_export import pair_gguf_path\n"
        "import sys; from specdec.text.gguf_tokenizer import GgufTokenizer\n"
        "GgufTokenizer(pair_gguf_path('pair:draft.gguf')).encode('a b')\n"
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], check=False, env=environment)
    assert done.returncode == 0
