"""Models that are not packed, and packed files with wrong metadata."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_tiny_checkpoint
from command_line import run_without_torch
from packed_models import change_tensors, logits, save_packable
from quantised_models import fp8, save_quantised

from backends.contract.source import BackendOptions
from backends.hf.loading import load_hf_model
from backends.hf.source import HfSource
from backends.packed.errors import PackError
from offload.errors import SpecdecError
from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import CheckpointError
from specdec.packing import pack as packing
from specdec.packing.pack import pack


def reported_without_torch(source: Path | str, out: Path) -> str:
    (reported,) = run_without_torch("specdec.cli.app", ["pack", "-m", str(source), "-o", str(out)])
    return reported


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("fp32", torch.float32)])
def test_other_formats_are_refused(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    plain = save_packable("llama", tmp_path / "plain", dtype)
    reported = reported_without_torch(plain, tmp_path / "a" / "b" / "packed")
    assert f"plain holds {name} weights, and bf16 alone is packed" in reported
    assert "use it as it is, or pack the bf16 checkpoint of this model" in reported
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_without_the_extra_no_copy_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same installation could not run it."""
    monkeypatch.setattr("backends.packed.kernels.has_numba", lambda: False)
    plain = save_packable("llama", tmp_path / "plain")
    with pytest.raises(SpecdecError, match=re.escape("pip install 'specdec-stream[pack]'")):
        pack(plain, tmp_path / "a" / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_mixtures_are_refused(tmp_path: Path) -> None:
    plain, out = save_tiny_checkpoint("mixtral", tmp_path / "plain"), tmp_path / "a" / "packed"
    assert "plain is a mixture of experts" in reported_without_torch(plain, out)
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    plain, out = save_packable("llama", tmp_path / "plain"), tmp_path / "a" / "packed"
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (plain / "config.json").write_text(json.dumps(config))
    assert "plain is quantised, in fewer bytes" in reported_without_torch(plain, out)
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_mixtures_and_quantised_ones_are_known_by_their_model_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither headers nor config tell, as other versions may write them."""
    monkeypatch.setattr(packing, "check_source", lambda _: None)
    mixture = save_tiny_checkpoint("mixtral", tmp_path / "mixture")
    with pytest.raises(PackError, match="is a mixture of experts"):
        pack(mixture, tmp_path / "a" / "packed")
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    quantised, _ = save_quantised(tmp_path / "fp8", fp8(), settings, torch.bfloat16)
    with pytest.raises(PackError, match="is quantised, in fewer bytes"):
        pack(quantised, tmp_path / "a" / "packed")
    assert {path.name for path in tmp_path.iterdir()} == {"mixture", "fp8"}


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    pack(plain, tmp_path / "packed")
    with pytest.raises(PackError, match="is packed already"):
        pack(tmp_path / "packed", tmp_path / "again")
    with pytest.raises(PackError, match="is there already"):
        pack(plain, tmp_path / "packed")
    assert "is GGUF" in reported_without_torch("pair:target.gguf", tmp_path / "again")
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "packed"}


def change_metadata(path: Path, change: dict[str, Any]) -> None:
    """Change the metadata of every packed tensor in the file, keeping its length."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    packed = json.loads(header["__metadata__"]["specdec.packed"])
    for entry in packed["tensors"].values():
        entry.update(change)
    header["__metadata__"]["specdec.packed"] = json.dumps(packed)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + n :])


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    pack(plain, tmp_path / "packed")
    index = WeightIndex.from_directory(tmp_path / "packed")
    record = index["model.layers.1.mlp.down_proj.weight"]
    with record.path.open("r+b") as file:
        file.seek(record.offset)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.down_proj.weight.*base is 255"):
        logits(tmp_path / "packed", is_streamed=True)
    for change, match in (
        ({"shape": [64, 64000]}, "weights take"),
        ({"scheme": "NEW"}, "packed as NEW, and only BF16_12 is known"),
        ({"scheme": "BF16_12", "dtype": "F16"}, "it holds BF16, not F16"),
    ):
        change_metadata(record.path, change)
        with pytest.raises(SpecdecError, match=match):
            HfSource(tmp_path / "packed", BackendOptions())


def test_embeddings_cannot_be_packed(tmp_path: Path) -> None:
    plain = save_packable("llama", tmp_path / "plain")
    pack(plain, tmp_path / "packed")
    index = WeightIndex.from_directory(tmp_path / "packed")
    path = index["model.embed_tokens.weight"].path
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    entry = header["model.embed_tokens.weight"]
    n_bytes = entry["data_offsets"][1] - entry["data_offsets"][0]
    packed = json.loads(header["__metadata__"]["specdec.packed"])
    packed["tensors"]["model.embed_tokens.weight"] = {
        "scheme": "BF16_12",
        "dtype": "BF16",
        "shape": [96, 32],
    }
    assert n_bytes > 64 + 3072 * 3 // 2
    entry.update(dtype="U8", shape=[n_bytes])
    header["__metadata__"]["specdec.packed"] = json.dumps(packed)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + n :])
    with pytest.raises(SpecdecError, match="embed_tokens"):
        HfSource(tmp_path / "packed", BackendOptions())


def test_who_reads_weights_itself_refuses_packed_ones(tmp_path: Path) -> None:
    from bench.synth.source import read_float32

    pack(save_packable("llama", tmp_path / "plain"), tmp_path / "packed")
    record = WeightIndex.from_directory(tmp_path / "packed")["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(CheckpointError, match="packed as BF16_12: name the checkpoint that was"):
        read_float32(record)


def test_a_file_that_lost_its_metadata_is_guessed_at(tmp_path: Path) -> None:
    pack(save_packable("llama", tmp_path / "plain"), tmp_path / "packed")
    change_tensors(tmp_path / "packed", lambda _, x: x)
    with pytest.raises(SpecdecError, match="U8 weights, or a packed file that lost its metadata"):
        load_hf_model(tmp_path / "packed")
