"""Any history of a backend's sequences gives the rows of logits that each has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alone import own
from backend_kinds import N_SLOTS, Kind, close, make_kind
from plain_rows import Fresh, Plain
from sequence_histories import MAX_NODES, try_sequences

from backends.attention.batch import BLOCK_SIZE
from backends.contract.backend import PREFIX
from backends.contract.recovery import RecoveringBackend
from backends.contract.sequence import SequenceInput

TEXT = np.random.default_rng(0).integers(3, 96, 140).tolist()
TREE, PARENTS = [7, 20, 30, 21, 22, 31, 40], [-1, 0, 0, 1, 3, 2, 3]


def scarce(kind: Kind, family: str, *, is_exact: bool = True) -> RecoveringBackend[Any]:
    """Load a model whose sequences must take each other's cells or blocks."""
    if not kind.is_gguf:
        sizes = {"max_context": 160, "num_kv_slots": 5 * BLOCK_SIZE, "max_nodes": None}
        return kind.load(family, is_exact=is_exact, **sizes)
    backend: Any = kind.load(family, is_exact=is_exact)
    if is_exact:
        backend._cells.n_cells = 90  # llama.cpp allocates multiples of 256
    return backend


@pytest.mark.slow_except(5)
@pytest.mark.parametrize(
    ("name", "family", "is_exact", "max_examples"),
    [
        ("torch-resident", "llama", True, 12),
        ("torch-resident", "mistral", True, 12),
        ("torch-resident", "minicpm3", True, 12),
        ("torch-resident", "bloom", True, 12),
        ("torch-resident", "mistral", False, 10),
        ("torch-resident", "minicpm3", False, 10),
        ("torch-resident", "bloom", False, 10),
        ("torch-resident q8_0", "llama", True, 12),
        ("torch-resident fp8", "llama", True, 12),
        ("torch-resident q8_0", "mistral", True, 12),
        ("torch-resident q8_0", "minicpm3", True, 12),
        ("torch-resident fp8", "bloom", True, 12),
        ("torch-resident q8_0", "qwen3.5-bf16", True, 12),
        ("device q8_0", "llama", True, 12),
        ("torch-streamed", "llama", True, 12),
        ("torch-streamed", "qwen3.5", True, 12),
        ("torch-resident", "qwen3.5-bf16", True, 12),
        ("torch-resident", "bamba", True, 12),
        ("torch-streamed", "bamba-bf16", True, 12),
        ("torch-resident", "lfm2", True, 12),
        ("torch-resident", "lfm2-bf16", True, 12),
        ("torch-resident", "falcon-h1", True, 12),
        ("torch-streamed", "falcon-h1-bf16", True, 12),
        ("torch-resident", "kimi-linear", True, 12),
        ("torch-resident", "kimi-linear-bf16", True, 12),
        ("torch-resident", "jamba", True, 12),
        ("torch-streamed", "jamba-bf16", True, 12),
        ("device", "llama", True, 12),
        pytest.param("llama-resident", "llama", True, 50, marks=pytest.mark.gguf),
        pytest.param("llama-resident", "gemma2", True, 50, marks=pytest.mark.gguf),
        pytest.param("llama-resident", "llama", False, 30, marks=pytest.mark.gguf),
        pytest.param("llama-resident", "gemma2", False, 30, marks=pytest.mark.gguf),
        pytest.param("llama-resident", "qwen3moe", False, 20, marks=pytest.mark.gguf),
        pytest.param("llama-streamed", "llama", True, 10, marks=pytest.mark.gguf),
    ],
)
def test_any_history_equals_a_fresh_prefill(
    name: str, family: str, is_exact: bool, max_examples: int, kind_models: Path
) -> None:
    """Bits where the backend is exact. The expected rows are those of a model in memory: where the
    weights are decides nothing."""
    kind = make_kind(name, kind_models)
    with (
        scarce(kind, family, is_exact=is_exact) as backend,
        kind.resident.load(family, is_exact=is_exact, max_context=160) as fresh,
    ):
        window = getattr(backend._model, "sliding_window", 0) if kind.is_gguf else 0
        try_sequences(
            backend,
            Fresh(fresh),
            depth=min(MAX_NODES, (window or 99) - 1),
            longest=40 if kind.is_gguf else 130,
            max_seqs=5 if kind.is_gguf else 3,
            is_right=np.array_equal if is_exact else close,
            max_examples=max_examples,
        )


def test_a_prefill_has_the_bits_of_one_token_per_pass(kind: Kind) -> None:
    sizes = {"max_context": len(TEXT)}
    with kind.load(**sizes) as backend, kind.resident.load(**sizes) as item:
        plain = Plain(item)
        for lengths in ([140], [41, 99], [64, 1, 75]):
            own(backend).rollback(0)
            for n in lengths:
                start = own(backend).n_committed
                row = own(backend).prefill(TEXT[start : start + n])
                assert np.array_equal(row, plain.row(TEXT[: start + n]))


def conversation(backend: RecoveringBackend[Any]) -> list[np.ndarray]:
    """Run two rounds of a prompt, a tree, a commit, a tree below it, a prune, a rollback."""
    actual = []
    for _ in range(2):
        actual.append(own(backend).prefill(TEXT[:12]))
        first = own(backend).next_node_id
        parents = [PREFIX if p == -1 else first + p for p in PARENTS]
        actual.append(own(backend).extend(TREE, parents)[1])
        own(backend).commit([first, first + 1, first + 3], keep=[first + 6])
        actual.append(own(backend).extend([50, 51], [first + 6, PREFIX], logits_at=[1])[1])
        own(backend).prune([first + 6])
        actual.append(own(backend).extend([9], [PREFIX])[1])
        own(backend).rollback(7)
    return actual


@pytest.mark.parametrize("is_exact", [True, False])
def test_where_the_weights_are_decides_nothing(streamed: Kind, is_exact: bool) -> None:
    """The same calls give the same bits even where a backend is not exact."""
    with (
        streamed.resident.load(is_exact=is_exact) as resident,
        streamed.load(is_exact=is_exact, n_layers=3) as backend,
    ):
        pairs = zip(conversation(resident), conversation(backend), strict=True)
        assert all(np.array_equal(*pair) for pair in pairs)
        assert resident.transfer_stats.bytes_streamed == 0
        assert backend.transfer_stats.bytes_streamed > 0


def test_a_pass_reads_the_model_once_for_all_sequences(streamed: Kind) -> None:
    n_layers = 6
    layers = streamed.source(n_layers=n_layers).layers
    n_model = sum(record.n_bytes for layer in layers for record in layer.streamed)
    with streamed.load(n_layers=n_layers) as backend:
        sequences = [backend.new_sequence() for _ in range(3)]
        for num_seqs in (1, 3):
            before = backend.transfer_stats.bytes_streamed
            for _ in range(8):
                batch = [SequenceInput(sequence, [5, 6]) for sequence in sequences[:num_seqs]]
                backend.forward(batch)
            n_read = backend.transfer_stats.bytes_streamed - before
            n_ahead = (N_SLOTS + 2) * n_model // n_layers
            assert 8 * (n_model - n_ahead) <= n_read <= 8 * n_model * 1.5 + n_ahead
