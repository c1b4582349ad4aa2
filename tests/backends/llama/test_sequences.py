"""Several sequences in one llama.cpp cache: each has the logits that it has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact_histories import Plain
from hypothesis import Phase
from sequence_histories import MAX_NODES, try_sequences

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from gguf_sequences import exact_source, load

from backends.contract.backend import BackendError
from backends.contract.exactness import NOT_ASKED
from backends.contract.sequence import SequenceInput

pytestmark = pytest.mark.gguf


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "F32"}),
        ("gemma2", {"dtype": "F32"}),
        ("qwen3moe", {"dtype": "F32"}),
        ("llama", {"dtype": "Q8_0", "feed_forward": 64}),
        ("llama", {"dtype": "Q4_K", "hidden": 256, "feed_forward": 256}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["dtype"],
)
def test_every_sequence_has_the_bits_that_it_has_alone(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source = exact_source(family, tmp_path, **options)
    with load(source) as backend, load(source, max_num_seqs=1) as plain:
        window = backend._model.sliding_window
        alone, depth = Plain(plain), min(MAX_NODES, (window or 99) - 1)
        try_sequences(backend, alone, depth=depth)
        assert backend._cells.n_moved > 0
        backend._cells.n_cells = 90  # the sequences must take cells of ended ones
        try_sequences(backend, alone, depth=depth)


def close(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Compare plain float32 attention: chunk lengths change rounding, wrong cells change values by
    0.01 or more."""
    return bool(np.abs(actual - expected).max() <= 5e-4 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_sequence_is_close_to_itself_alone_on_an_inexact_backend(
    family: str, tmp_path: Path
) -> None:
    source = exact_source(family, tmp_path, dtype="F32")
    types = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": False}
    with (
        load(source, exactness=NOT_ASKED, **types) as backend,
        load(source, exactness=NOT_ASKED, **types) as plain,
    ):
        window = backend._model.sliding_window
        depth = min(MAX_NODES, (window or 99) - 1)
        try_sequences(backend, Plain(plain), depth=depth, is_right=close)
        assert backend._cells.n_moved == 0


def test_sequences_of_a_streamed_model(tmp_path: Path) -> None:
    source = exact_source("llama", tmp_path, dtype="F16")
    with load(source, is_streamed=True) as backend, load(source) as plain:
        try_sequences(backend, Plain(plain), max_examples=6)
        sequences = [backend.new_sequence() for _ in range(3)]
        n_model = sum(r.n_bytes for layer in source.layers for r in layer.streamed)
        for num_seqs in (1, 3):
            before = backend.stream_use.bytes_streamed
            for _ in range(8):
                backend.forward(
                    [SequenceInput(sequence, [5, 6]) for sequence in sequences[:num_seqs]]
                )
            n_read = backend.stream_use.bytes_streamed - before
            assert 0 < n_read <= 9 * n_model  # as far as the ring reads ahead


def test_exactness_needs_the_order_of_cells(tmp_path: Path) -> None:
    source = exact_source("llama", tmp_path, dtype="F32")
    with load(source) as backend, load(source) as plain:
        backend._cells.state = None
        # Different bits; or a saved prefix whose cells belong to no prefix.
        with pytest.raises((AssertionError, BackendError)):
            try_sequences(backend, Plain(plain), max_examples=100, phases=[Phase.generate])
