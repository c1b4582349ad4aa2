"""Metadata of packed tensors is untrusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import refused, write_raw

from offload.formats.checkpoint import WeightIndex

ENTRY: dict[str, Any] = {"scheme": "BF16_12", "dtype": "BF16", "shape": [2, 3]}
TENSOR: dict[str, Any] = {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}


def write(folder: Path, packed: Any, tensor: dict[str, Any] = TENSOR) -> Path:
    text = packed if isinstance(packed, str) else json.dumps(packed)
    header = {"__metadata__": {"specdec.packed": text}, "a": tensor}
    write_raw(folder / "model.safetensors", header, bytes(9))
    return folder


def test_records_are_what_is_decoded(tmp_path: Path) -> None:
    write(tmp_path, {"version": 1, "tensors": {"a": ENTRY}})
    record = WeightIndex.from_directory(tmp_path)["a"]
    assert (record.dtype, record.shape, record.n_bytes) == ("BF16", (2, 3), 9)
    assert record.scheme == "BF16_12"


@pytest.mark.parametrize(
    ("packed", "match"),
    [
        ("[1]", "not an object"),
        ("{", "invalid JSON"),
        ('{"version": 1, "version": 1}', "twice"),
        ("[" * 100_000, "invalid JSON"),
        ({"tensors": {}}, "packed in version 'None', not 1: take a newer specdec"),
        ({"version": 2, "tensors": {}}, "packed in version '2', not 1"),
        ({"version": True, "tensors": {}}, "packed in version 'True', not 1"),
        ({"version": 1}, "not listed"),
        ({"version": 1, "tensors": ["a"]}, "not listed"),
        ({"version": 1, "tensors": {"b": ENTRY}}, "'b' is not in the file"),
        ({"version": 1, "tensors": {"a": {"scheme": "X"}}}, "exactly scheme, dtype and shape"),
        ({"version": 1, "tensors": {"a": "BF16_12"}}, "exactly scheme, dtype and shape"),
        ({"version": 1, "tensors": {"a": {**ENTRY, "scheme": "a\nb"}}}, "for a scheme"),
        ({"version": 1, "tensors": {"a": {**ENTRY, "scheme": ["X"]}}}, "for a scheme"),
        ({"version": 1, "tensors": {"a": {**ENTRY, "dtype": "Q4"}}}, "unknown dtype 'Q4'"),
        ({"version": 1, "tensors": {"a": {**ENTRY, "dtype": []}}}, "unknown dtype"),
        ({"version": 1, "tensors": {"a": {**ENTRY, "shape": [-1]}}}, "non-negative integers"),
        ({"version": 1, "tensors": {"a": {**ENTRY, "shape": [1] * 33}}}, "short list"),
        ({"version": 1, "tensors": {"a": {**ENTRY, "shape": [2**40, 2**40]}}}, "weights"),
    ],
)
def test_hostile_metadata_is_refused(tmp_path: Path, packed: Any, match: str) -> None:
    refused(write(tmp_path, packed), match)


def test_only_bytes_are_packed(tmp_path: Path) -> None:
    tensor = {"dtype": "U8", "shape": [3, 3], "data_offsets": [0, 9]}
    refused(write(tmp_path, {"version": 1, "tensors": {"a": ENTRY}}, tensor), r"not as U8 \[bytes")
