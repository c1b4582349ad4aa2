"""Checkpoints are untrusted: everything wrong about one gives one clear error."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from offload.header import MAX_HEADER_BYTES
from offload.index import CheckpointError, WeightIndex, read_header

GOOD: dict[str, Any] = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def write_raw(path: Path, header: bytes | dict[str, Any], data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.unlink(missing_ok=True)  # overwriting would make ext4 write the old content out first
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def refused(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        WeightIndex.from_directory(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000 + 2 * len(str(folder))


# --- what works --------------------------------------------------------------------------------


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
    records = read_header(path)
    assert records["w"].offset == path.stat().st_size - 15
    assert records["q"].n_bytes == 3


def write_shards(folder: Path, **listed: str) -> None:
    """x and y in two shards; `listed` overrides or adds entries of the weight map."""
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


# --- which files -------------------------------------------------------------------------------


def test_no_directory_and_no_weights(tmp_path: Path) -> None:
    refused(tmp_path / "none", "not a directory")
    refused(tmp_path, "no model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "x.ckpt"])
def test_pickled_weights_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    refused(tmp_path, f"{name}.*refused; convert")


def test_gguf_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "model-q4.gguf.*not supported yet")


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


def test_a_tensor_in_the_wrong_shard_in_none_or_in_two(tmp_path: Path) -> None:
    write_shards(tmp_path, y="m-1.safetensors", z="m-2.safetensors")
    refused(tmp_path, "'y' is listed in m-1.safetensors but lies in m-2|'z' is listed")
    write_shards(tmp_path, z="m-2.safetensors")
    refused(tmp_path, "'z' is listed in m-2.safetensors but lies in no shard")
    save_file({"x": np.zeros(3)}, tmp_path / "m-2.safetensors")
    write_map(tmp_path, {"x": "m-1.safetensors", "y": "m-2.safetensors"})
    refused(tmp_path, "'x' lies both in")


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


# --- one header --------------------------------------------------------------------------------


def _entry(**changes: object) -> dict[str, Any]:
    return {"x": {**GOOD, **changes}}


@pytest.mark.parametrize(
    ("header", "data", "match"),
    [
        ({}, b"1", "describes"),
        (b"not json", b"", "invalid JSON"),
        (b"\xff\xfe{}", b"", "invalid JSON"),
        (b"[" * 100_000, b"", "invalid JSON"),
        (b'{"x": ' + b"9" * 10_000 + b"}", b"", "invalid JSON"),
        (b"[1]", b"", "not an object"),
        (b"", b"", "invalid JSON"),
        (b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"x":1}', b"1234", "'x' twice"),
        ({"x": 7}, b"", "exactly dtype"),
        ({"x": {"dtype": "U8", "shape": [4]}}, b"1234", "exactly dtype"),
        (_entry(extra=1), b"1234", "exactly dtype"),
        (_entry(dtype="F128"), b"1234", "unknown dtype 'F128'"),
        (_entry(dtype=["U8"]), b"1234", "unknown dtype"),
        (_entry(dtype="X" * 10_000), b"1234", "unknown dtype"),
        (_entry(shape=[-4]), b"1234", "non-negative"),
        (_entry(shape=[True, 4]), b"1234", "non-negative"),
        (_entry(shape=[4.0]), b"1234", "non-negative"),
        (_entry(shape="4"), b"1234", "non-negative"),
        (_entry(shape=[1] * 33), b"1234", "short list"),
        (_entry(shape=[2**64, 4]), b"1234", "non-negative"),
        (_entry(shape=[2**62, 4]), b"1234", "does not fill"),  # wraps to 0 in 64 bits
        (_entry(shape=[2**63 - 1] * 32), b"1234", "does not fill"),
        (_entry(shape=[5]), b"1234", "does not fill its 4 bytes"),
        (_entry(dtype="F4", shape=[9]), b"1234", "does not fill"),
        (_entry(data_offsets=[0, 4, 4]), b"1234", "ascending"),
        (_entry(data_offsets=[4, 0]), b"1234", "ascending"),
        (_entry(data_offsets=[-4, 0]), b"1234", "ascending"),
        (_entry(data_offsets=[0, None]), b"1234", "ascending"),
        (_entry(data_offsets=[0, 2**63]), b"1234", "ascending"),
        (_entry(data_offsets=[1, 5]), b"12345", "hole"),
        (_entry(), b"123", "describes"),  # beyond the end
        (_entry(), b"12345", "describes"),  # unused bytes at the end
        ({"x": GOOD, "y": GOOD}, b"1234", "overlaps"),
        ({"x": GOOD, "y": {**GOOD, "data_offsets": [2, 6]}}, b"123456", "overlaps"),
        ({"x": GOOD, "y": {**GOOD, "data_offsets": [5, 9]}}, b"123456789", "hole"),
    ],
)
def test_hostile_headers(tmp_path: Path, header: Any, data: bytes, match: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, data)
    refused(tmp_path, match)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "0 bytes, too few"),
        (b"\x02\0\0", "3 bytes, too few"),
        (struct.pack("<Q", 3) + b"{}", "only 10 bytes"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "claims a header of 18446744073709551615"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "at most 64.00 MiB"),
    ],
)
def test_hostile_lengths(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, match)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(9.0), "b": np.arange(3, dtype=np.uint8)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.unlink()
        path.write_bytes(whole[:length])
        refused(tmp_path, "model.safetensors")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BF16", "F4", "F32", "?"]) | JSON,
        "shape": st.lists(st.integers(-1, 9) | st.just(2**62), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON,
    }
)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(st.text(max_size=5), ENTRY | JSON, max_size=4),
    data=st.binary(max_size=40),
)
def test_any_header_is_accepted_whole_or_refused(
    tmp_path: Path, header: dict[str, Any], data: bytes
) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, data)
    try:
        records = read_header(path)
    except CheckpointError:
        return
    spans = sorted((r.offset, r.offset + r.n_bytes) for r in records.values())
    assert all(end <= path.stat().st_size for _, end in spans)
    assert sum(end - start for start, end in spans) == len(data)
