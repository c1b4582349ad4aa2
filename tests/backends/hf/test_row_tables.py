"""Embeddings by layer (Gemma 3n and 4) are read by rows: in no memory, and equal to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import save_tiny_checkpoint
from family_checks import PROMPT, TOLERANCE, reference_logits, scale

from backends.contract.source import BackendOptions
from backends.hf import cpu_weights, source
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.loading import load_hf_model
from backends.hf.model import HfModel
from backends.hf.row_tables import tables_of
from backends.hf.source import HfSource
from offload.formats.tensors import TensorRecord
from offload.storage.direct_io import StorageError

LARGE = 8192
"""Rows of the table: 1 MiB, more than all other tensors together."""


@pytest.fixture(scope="module", params=["gemma3n", "gemma4"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows") / request.param
    return save_tiny_checkpoint(request.param, folder, vocab_size_per_layer_input=LARGE)


def prefill(model: HfModel) -> np.ndarray:
    with TorchBackend(model, CpuWeights(model, model.layer_weights, 2)) as backend:
        return backend.new_sequence().prefill(PROMPT)


def all_records(model: HfModel) -> list[TensorRecord]:
    return list(model.non_layer_records)


def test_the_table_is_in_no_memory_and_its_rows_are_those_of_transformers(directory: Path) -> None:
    model = load_hf_model(directory)
    (table,) = tables_of(model)
    weights = CpuWeights(model, model.layer_weights, 2)
    assert weights._non_layer.n_bytes < table.record.n_bytes
    assert HfSource(directory, BackendOptions()).non_layer_bytes < table.record.n_bytes
    with TorchBackend(model, weights) as backend:
        sequence = backend.new_sequence()
        expected = reference_logits(directory, PROMPT)[-1]
        logits = sequence.prefill(PROMPT)
        assert np.abs(logits - expected).max() <= TOLERANCE * scale(expected)
    assert "forward" not in table.module.__dict__


def test_it_gives_the_bits_of_a_table_in_memory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_rows = prefill(load_hf_model(directory))
    monkeypatch.setattr(cpu_weights, "tables_of", lambda model: ())
    monkeypatch.setattr(cpu_weights, "resident_records", all_records)
    assert np.array_equal(prefill(load_hf_model(directory)), by_rows)


def test_the_index_of_padding_is_that_of_the_whole_table(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(
        "gemma3n", tmp_path, vocab_size_per_layer_input=LARGE, pad_token_id=90
    )
    model = load_hf_model(folder)
    (table,) = tables_of(model)
    assert table.module.padding_idx == 90
    expected = reference_logits(folder, PROMPT)[-1]
    assert np.abs(prefill(model) - expected).max() <= TOLERANCE * scale(expected)
    assert table.module.padding_idx == 90


def test_the_plan_counts_the_rows_of_a_pass(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = HfSource(directory, BackendOptions(is_exact=False))
    with_rows = here.scratch_bytes(256, 100, 0)
    monkeypatch.setattr(source, "row_bytes", lambda model: 0)
    (table,) = tables_of(here.model)
    one_row = table.record.n_bytes // LARGE
    assert with_rows - here.scratch_bytes(256, 100, 0) >= 100 * one_row


def test_a_cut_file_is_one_line(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.hf.row_tables.read_part", lambda *where: b"")
    with pytest.raises(StorageError, match="ends within") as error:
        prefill(load_hf_model(directory))
    assert "\n" not in str(error.value)
