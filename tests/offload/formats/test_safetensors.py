"""A safetensors header, whatever its content, is accepted whole or refused in one line."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import GOOD, refused, write_raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from offload.formats.safetensors import MAX_HEADER_BYTES, MAX_TENSORS, read_header_and_metadata
from offload.formats.tensors import CheckpointError
from offload.units import MIB


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
        (_entry(data_offsets=[1, 5]), b"12345", "hole; download"),
        (_entry(), b"123", "describes"),  # beyond the end
        (_entry(), b"12345", "describes"),  # unused bytes at the end
        ({"x": GOOD, "y": GOOD}, b"1234", "overlaps"),
        ({"x": GOOD, "y": {**GOOD, "data_offsets": [2, 6]}}, b"123456", "another one; download"),
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
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "at most 16.00 MiB"),
    ],
)
def test_hostile_lengths(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, match)


def empty_tensors(n_tensors: int) -> dict[str, Any]:
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return {f"t{number}": empty for number in range(n_tensors)}


@pytest.mark.slow
def test_as_many_tensors_as_are_accepted(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "model.safetensors", empty_tensors(MAX_TENSORS))
    assert len(read_header_and_metadata(path)[1]) == MAX_TENSORS
    write_raw(path, empty_tensors(MAX_TENSORS + 1))
    refused(tmp_path, "holds 65537 tensors; at most 65536")


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("value", [b"[]", b"0", b'{"":0}', b'"a"'])
def test_headers_of_many_small_values_cost_little(tmp_path: Path, value: bytes) -> None:
    values = b",".join([value] * (15 * MIB // (len(value) + 1)))
    write_raw(tmp_path / "model.safetensors", b'{"__metadata__":{"a":[' + values + b"]}}")
    del values
    tracemalloc.start()
    try:
        refused(tmp_path, "JSON of .* values; at most 1048576")
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


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
        _, records = read_header_and_metadata(path)
    except CheckpointError:
        return
    spans = sorted((r.offset, r.offset + r.n_bytes) for r in records.values())
    assert all(end <= path.stat().st_size for _, end in spans)
    assert sum(end - start for start, end in spans) == len(data)
