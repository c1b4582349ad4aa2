"""Checkpoint files are untrusted: every defect gives one clear error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import refused, write_raw
from safetensors.numpy import save_file

from offload.formats.checkpoint import WeightIndex
from offload.formats.safetensors import read_header_and_metadata

# --- valid checkpoints ----------------------------------------------------------------------------


def test_a_single_file(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(5, dtype=np.int8),
        "empty": np.zeros((0, 7), dtype=np.float16),
        "scalar": np.array(2.5),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    index = WeightIndex.from_directory(tmp_path)
    assert set(index) == set(tensors)
    assert len(index) == 4
    assert index.total_bytes == sum(t.nbytes for t in tensors.values())
    data = (tmp_path / "model.safetensors").read_bytes()
    for name, tensor in tensors.items():
        record = index[name]
        assert record.shape == tensor.shape
        assert data[record.offset : record.offset + record.n_bytes] == tensor.tobytes()
    assert (index["a"].dtype, index["b"].dtype) == ("F32", "I8")


def test_bf16_and_packed_types(tmp_path: Path) -> None:
    header = {
        "w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "q": {"dtype": "F4", "shape": [3, 2], "data_offsets": [12, 15]},
        "__metadata__": {"format": "pt"},
    }
    path = write_raw(tmp_path / "model.safetensors", header, bytes(15))
    _, records = read_header_and_metadata(path)
    assert records["w"].offset == path.stat().st_size - 15
    assert records["q"].n_bytes == 3


def write_shards(folder: Path, **listed: str) -> None:
    """Write x and y in two shards; `listed` overrides or adds entries of the weight map."""
    save_file({"x": np.zeros(3, dtype=np.float32)}, folder / "m-1.safetensors")
    save_file({"y": np.ones(5, dtype=np.float32)}, folder / "m-2.safetensors")
    weight_map = {"x": "m-1.safetensors", "y": "m-2.safetensors", **listed}
    write_map(folder, weight_map)


def write_map(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = WeightIndex.from_directory(tmp_path)
    assert {name: r.path.name for name, r in index.items()} == {
        "x": "m-1.safetensors",
        "y": "m-2.safetensors",
    }


def test_one_file_of_another_name_and_one_other_index(tmp_path: Path) -> None:
    save_file({"x": np.zeros(3)}, tmp_path / "weights.safetensors")
    assert list(WeightIndex.from_directory(tmp_path)) == ["x"]
    write_map(tmp_path, {"x": "weights.safetensors"})
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "m.safetensors.index.json")
    assert list(WeightIndex.from_directory(tmp_path)) == ["x"]
    (tmp_path / "n.safetensors.index.json").write_text("{}")
    refused(tmp_path, "several indexes")


@pytest.mark.parametrize("shared", [False, True])
def test_a_hugging_face_cache(tmp_path: Path, shared: bool) -> None:
    repository = tmp_path / "hub" / "models--a--b"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    blob = repository / "blobs" / "abcdef"
    blob.parent.mkdir()
    if shared:  # <cache>/blobs/<two letters>/<hash>, behind the repository's own blob
        store = tmp_path / "hub" / "blobs" / "01" / "0123"
        store.parent.mkdir(parents=True)
        save_file({"x": np.zeros(3)}, store)
        blob.symlink_to("../../blobs/01/0123")
    else:
        save_file({"x": np.zeros(3)}, blob)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abcdef")
    assert list(WeightIndex.from_directory(snapshot)) == ["x"]
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert list(WeightIndex.from_directory(link)) == ["x"]


# --- file selection -------------------------------------------------------------------------------


def test_no_directory_and_no_weights(tmp_path: Path) -> None:
    refused(tmp_path / "none", "not a directory")
    refused(tmp_path, "no model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "x.ckpt"])
def test_pickled_weights_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    refused(tmp_path, f"{name}.*refused; convert")


def test_gguf_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "model-q4.gguf.*name that file")


def test_shards_without_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "2 .safetensors files but no index")


@pytest.mark.parametrize(
    "shard",
    ["../m-1.safetensors", "/etc/passwd", "/tmp/x.safetensors", "a/b.safetensors", "..", "",
     "m-1.bin", "a\\b.safetensors", "m\0.safetensors", ".hidden.safetensors", 7, None, ["x"],
     "C:x.safetensors"],
)  # fmt: skip
def test_shard_names_must_be_plain(tmp_path: Path, shard: object) -> None:
    save_file({"x": np.zeros(3)}, tmp_path.parent / "m-1.safetensors")
    write_map(tmp_path, {"x": shard})
    refused(tmp_path, "not a plain .safetensors file name")


def test_a_link_out_of_the_folder(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "model"
    outside.mkdir()
    folder.mkdir()
    save_file({"x": np.zeros(3)}, outside / "secret.safetensors")
    (folder / "model.safetensors").symlink_to(outside / "secret.safetensors")
    refused(folder, "outside of the checkpoint's folder")


def test_a_link_out_of_a_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    save_file({"x": np.zeros(3)}, tmp_path / "secret.safetensors")
    (snapshot / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    refused(snapshot, "outside of the checkpoint's folder")


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    refused(tmp_path, "missing or cannot be resolved")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    refused(tmp_path, "missing or cannot be resolved")


def test_a_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()
    refused(tmp_path, "m-2.safetensors is missing")


def test_an_index_names_files_and_the_last_file_counts(tmp_path: Path) -> None:
    """The last file counts, as in transformers, wherever the index places a tensor, if at all."""
    write_shards(tmp_path, y="m-1.safetensors", z="m-2.safetensors")
    index = WeightIndex.from_directory(tmp_path)
    assert {name: r.path.name for name, r in index.items()} == {
        "x": "m-1.safetensors",
        "y": "m-2.safetensors",
    }
    save_file({"x": np.zeros(3), "w": np.ones(1)}, tmp_path / "m-2.safetensors")
    save_file({"x": np.zeros(9), "v": np.ones(1)}, tmp_path / "m-1.safetensors")
    write_map(tmp_path, {"y": "m-2.safetensors", "x": "m-1.safetensors"})
    index = WeightIndex.from_directory(tmp_path)
    assert index["x"].shape == (3,)
    assert [r.path.name[:3] for r in index.values()] == ["m-1", "m-2", "m-2"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"x": "m-1.safetensors", "x": "b"}}',
    ],
)
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "model.safetensors.index.json")


def test_special_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    refused(tmp_path, "not a regular file")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, "not a regular file")
    (tmp_path / "model.safetensors").rmdir()
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    refused(tmp_path, "not a regular file")
