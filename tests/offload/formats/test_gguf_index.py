"""One GGUF file or a set of splits, indexed by tensor name."""

from __future__ import annotations

from pathlib import Path

import gguf_bytes as gb
import pytest

from offload.formats.gguf_index import GgufError, GgufIndex
from offload.formats.tensors import CheckpointError

META = {"general.architecture": ("str", "llama")}
PARTS = (
    {"a": ("F32", (2, 4)), "b": ("Q8_0", (3, 32))},
    {"c": ("I8", (7,))},
    {"d": ("F16", (5, 2)), "e": ("I8", (1,))},
)


def refused(path: Path, match: str) -> None:
    with pytest.raises(GgufError, match=match) as caught:
        GgufIndex.from_path(path)
    assert "\n" not in str(caught.value)


def rewrite(path: Path, part: dict, **split: tuple[str, object]) -> None:
    """Overwrite one split with other split metadata (None drops a key)."""
    keys = {f"split.{key.replace('__', '.')}": item for key, item in split.items() if item}
    path.unlink(missing_ok=True)
    path.write_bytes(gb.make_file(keys, part))


def test_one_file(tmp_path: Path) -> None:
    path = gb.write_model(tmp_path / "any name.gguf")
    index = GgufIndex.from_path(str(path))
    expected = gb.model_tensors()
    assert list(index) == list(expected)
    assert len(index) == len(expected)
    assert {name: (r.dtype, r.shape) for name, r in index.items()} == expected
    assert index.paths == (path,)
    assert index.total_bytes == sum(gb.tensor_bytes(*item) for item in expected.values())
    assert index.metadata["llama.block_count"] == 2
    assert "nothing" not in index


@pytest.mark.parametrize("n_files", [1, 2, 3])
@pytest.mark.parametrize("start", [0, -1])
def test_splits_from_any_of_them(tmp_path: Path, n_files: int, start: int) -> None:
    paths = gb.write_splits(tmp_path, META, PARTS[:n_files])
    index = GgufIndex.from_path(paths[start])
    assert index.paths == tuple(paths)
    assert index.metadata["general.architecture"] == "llama"
    assert list(index) == [name for part in PARTS[:n_files] for name in part]
    for number, part in enumerate(PARTS[:n_files]):
        content = paths[number].read_bytes()
        for position, name in enumerate(part):
            record = index[name]
            assert record.path == paths[number]
            data = content[record.offset : record.offset + record.n_bytes]
            assert data == bytes([100 * number + position]) * record.n_bytes


def test_a_first_split_without_tensors_and_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = gb.write_splits(tmp_path, META, ({}, *PARTS))
    assert len(GgufIndex.from_path(paths[0])) == 5
    monkeypatch.chdir(tmp_path)
    assert GgufIndex.from_path(paths[2].name).paths[0] == Path(paths[0].name)


def test_links_as_in_a_hugging_face_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    for number, path in enumerate(gb.write_splits(tmp_path, META, PARTS)):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../blobs/{number}")
    index = GgufIndex.from_path(snapshot / "model-00001-of-00003.gguf")
    assert len(index) == 5
    assert {path.parent for path in index.paths} == {snapshot}


def test_a_missing_split(tmp_path: Path) -> None:
    paths = gb.write_splits(tmp_path, META, PARTS)
    paths[1].unlink()
    refused(paths[0], r"one of 3 splits, of which 1 are missing .*model-00002-of-00003\.gguf")
    paths[1].symlink_to("nowhere")
    refused(paths[2], "missing")


def test_a_split_of_another_name(tmp_path: Path) -> None:
    paths = gb.write_splits(tmp_path, META, PARTS)
    for name in ("model.gguf", "model-00001-of-00004.gguf", "model-1-of-3.gguf"):
        paths[0].rename(tmp_path / name)
        refused(tmp_path / name, "not named like NAME-00001-of-00003.gguf")
        (tmp_path / name).rename(paths[0])
    paths[1].rename(tmp_path / "x")
    paths[2].rename(paths[1])
    (tmp_path / "x").rename(paths[2])
    refused(paths[0], "model-00002-of-00003.gguf is split number 3 by its header")


def test_split_metadata_that_disagree(tmp_path: Path) -> None:
    paths = gb.write_splits(tmp_path, META, PARTS)
    number, total = ("u16", 1), ("i32", 5)
    rewrite(paths[1], PARTS[1], no=number, count=("u16", 2), tensors__count=total)
    refused(paths[0], "00002-of-00003.gguf is not one of 3 splits")
    rewrite(paths[1], PARTS[1])
    refused(paths[0], "00002-of-00003.gguf is not one of 3 splits")
    rewrite(paths[1], {}, no=number, count=("u16", 3))
    refused(paths[0], "all splits hold 5 tensors, but they hold 4")
    rewrite(paths[1], PARTS[0], no=number, count=("u16", 3))
    refused(paths[0], "00002-of-00003.gguf holds 'a', which model-00001-of-00003.gguf holds too")
    rewrite(paths[1], PARTS[1], no=number, count=("u16", 3))  # its own total may be missing
    assert len(GgufIndex.from_path(paths[0])) == 5


@pytest.mark.parametrize("item", [("str", "3"), ("i32", -3), ("f32", 3.0), ("[u16]", [3])])
def test_a_split_count_that_is_no_number(tmp_path: Path, item: tuple[str, object]) -> None:
    path = tmp_path / "model-00001-of-00003.gguf"
    rewrite(path, PARTS[0], count=item)
    refused(path, "split.count of .* not a natural number")


def test_too_many_splits(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-99999.gguf"
    rewrite(path, PARTS[0], no=("u32", 0), count=("u32", 99999))
    refused(path, "claims 99999 splits; at most 1000")


def test_a_malformed_split_is_named(tmp_path: Path) -> None:
    paths = gb.write_splits(tmp_path, META, PARTS)
    paths[2].write_bytes(b"GGUF" + bytes(50))
    refused(paths[0], "model-00003-of-00003.gguf is GGUF version 0")


def test_any_changed_split_is_noticed(tmp_path: Path) -> None:
    paths = gb.write_splits(tmp_path, META, PARTS[:2])
    index = GgufIndex.from_path(paths[0])
    index.check_unchanged()
    paths[1].touch()
    with pytest.raises(CheckpointError, match="00002-of-00002.gguf was changed or replaced"):
        index.check_unchanged()
    paths[1].unlink()
    with pytest.raises(CheckpointError, match="cannot read .*00002-of-00002.gguf"):
        index.check_unchanged()
