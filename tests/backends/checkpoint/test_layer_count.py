"""A config.json whose number of layers differs from the checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_tiny_checkpoint

from backends.hf.loading import load_hf_model
from offload.formats.tensors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_checkpoint("llama", tmp_path / "model", num_hidden_layers=6)


def change_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_missing_layers_are_reported_before_the_model_is_built(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_config(checkpoint, num_hidden_layers=1_000_000_000)
    monkeypatch.setattr("backends.checkpoint.config.AutoConfig", None)  # building would be too late
    with pytest.raises(CheckpointError, match="says 1000000000 layers, the checkpoint holds 6"):
        load_hf_model(checkpoint)


def test_fewer_layers_than_the_checkpoint_has_would_be_another_model(checkpoint: Path) -> None:
    change_config(checkpoint, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match="has 6 layers, the config asks for 3"):
        load_hf_model(checkpoint)


def test_layers_for_the_tokens_after_the_next_one_need_not_run(checkpoint: Path) -> None:
    change_config(checkpoint, num_hidden_layers=5, num_nextn_predict_layers=1)
    assert len(load_hf_model(checkpoint).layers) == 5
