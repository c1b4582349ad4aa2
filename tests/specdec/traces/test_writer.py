"""Folders of traces: what is read is what was written, limits, and folders that are refused."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from specdec.traces.format import INDEX, TracedSequence, TraceError, TraceHeader, read_index
from specdec.traces.reader import Traces
from specdec.traces.top_k import TopK
from specdec.traces.writer import TraceWriter

HEADER = TraceHeader(vocab_size=50, target="a model", top_k=4)


def sequence(seed: int, n_tokens: int = 6, num_rows: int = 3, width: int = 0) -> TracedSequence:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_rows, HEADER.vocab_size)).astype(np.float32)
    states = rng.normal(size=(n_tokens, width)).astype(np.float32) if width else None
    rows = np.arange(n_tokens - num_rows, n_tokens, dtype=np.int32)
    ids = rng.integers(0, HEADER.vocab_size, n_tokens).astype(np.int32)
    return TracedSequence(ids, rows, TopK.of(logits, HEADER.top_k), states)


def assert_equal(traces: Traces, expected: list[TracedSequence]) -> None:
    assert len(traces) == len(expected)
    for number, item in enumerate(expected):
        assert traces.token_ids(number).tolist() == item.token_ids.tolist()
        assert traces.rows(number).tolist() == item.rows.tolist()
        for actual, column in zip(traces.top(number), item.top, strict=True):
            np.testing.assert_array_equal(actual, column)


@pytest.mark.parametrize("k", [1, 4, 50])
def test_top_k_are_the_likeliest_and_the_rest(k: int) -> None:
    logits = np.random.default_rng(0).normal(size=(7, 50)).astype(np.float32) * 3
    top = TopK.of(logits, k)
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    order = np.argsort(-logits, axis=1)
    assert top.ids.tolist() == order[:, :k].tolist()
    np.testing.assert_allclose(
        np.exp(top.logprobs.astype(np.float32)), np.take_along_axis(probs, order[:, :k], 1), 0.01
    )
    rest = np.take_along_axis(probs, order[:, k:], 1).sum(axis=1)
    np.testing.assert_allclose(np.exp(top.rest.astype(np.float64)), rest, rtol=0.01)


def test_equal_logits_come_in_order_of_ids() -> None:
    assert TopK.of(np.zeros((1, 9), dtype=np.float32), 9).ids.tolist() == [list(range(9))]


def test_sequences_of_several_shards_and_writers(tmp_path: Path) -> None:
    expected = [sequence(i, n_tokens=5 + i) for i in range(5)]
    for part in (expected[:3], expected[3:]):
        writer = TraceWriter(tmp_path / "t", HEADER, shard_bytes=2 * expected[0].n_bytes)
        for item in part:
            assert writer.add(item)
        writer.close()
    assert len(read_index(tmp_path / "t").shards) > 2
    assert_equal(Traces(tmp_path / "t"), expected)


def test_hidden_states_are_bfloat16(tmp_path: Path) -> None:
    header = replace(HEADER, hidden_layers=(1, -1), hidden_size=8)
    writer = TraceWriter(tmp_path, header)
    items = [sequence(i, width=8) for i in range(2)]
    for item in items:
        writer.add(item)
    writer.close()
    path, part = Traces(tmp_path).location(1)
    with safe_open(path, framework="pt") as file:
        actual = file.get_slice("hidden_states")[part]
    import torch

    states = items[1].hidden_states
    assert states is not None
    assert torch.equal(actual, torch.from_numpy(states).bfloat16())


def test_the_limit_counts_what_was_there(tmp_path: Path) -> None:
    item, limit = sequence(0), 5000
    for n_given in (10, 100):
        writer = TraceWriter(tmp_path, HEADER, limit)
        given = [writer.add(item) for _ in range(n_given)]
        writer.close()
        assert writer.is_full == (not all(given))
    assert writer.is_full
    index = read_index(tmp_path)
    assert 10 < index.n_sequences < 110
    n_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert limit - 2000 < index.n_bytes == n_bytes <= limit


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", HEADER)
    writer.add(sequence(0))
    writer.close()
    for path in (tmp_path / "t", *(tmp_path / "t").glob("*.safetensors")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, HEADER)
    with pytest.raises(TraceError, match="another process writes"):
        TraceWriter(tmp_path, HEADER)
    writer.close()
    TraceWriter(tmp_path, HEADER).close()


def test_traces_of_another_model_are_refused(tmp_path: Path) -> None:
    TraceWriter(tmp_path, HEADER).close()
    with pytest.raises(TraceError, match="traces of another model"):
        TraceWriter(tmp_path, replace(HEADER, target="another"))


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(TraceError, match="other files"):
        TraceWriter(tmp_path, HEADER)


@pytest.mark.parametrize("change", ["version", "shard", "path", "missing", "cut", "none"])
def test_damaged_folders_are_refused(tmp_path: Path, change: str) -> None:
    writer = TraceWriter(tmp_path, HEADER)
    writer.add(sequence(0))
    writer.close()
    (file,) = tmp_path.glob("*.safetensors")
    values = json.loads((tmp_path / INDEX).read_text())
    match change:
        case "version":
            values["version"] = 2
        case "shard":
            values["shards"][0]["n_tokens"] += 1
        case "path":
            values["shards"][0]["file"] = "../../etc/passwd"
        case "missing":
            file.unlink()
        case "cut":
            file.write_bytes(file.read_bytes()[:-5])
    (tmp_path / INDEX).write_text(json.dumps(values))
    if change == "none":
        (tmp_path / INDEX).unlink()
    with pytest.raises(TraceError):
        Traces(tmp_path)
