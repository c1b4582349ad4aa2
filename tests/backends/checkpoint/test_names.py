"""Checkpoint tensors are found by current names and by older ones that transformers knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_pair import save_model
from transformers.core_model_loading import WeightRenaming

from backends.checkpoint import matching
from backends.hf.loading import load_hf_model


def test_todays_names_need_no_list_of_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building that list takes transformers a fifth of a second."""

    def older_names(model: Any) -> list[WeightRenaming]:
        raise AssertionError("the list was made")

    monkeypatch.setattr(matching, "get_model_conversion_mapping", older_names)
    load_hf_model(save_model(tmp_path / "model", seed=1))


def test_older_names_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_model(tmp_path / "model", seed=1)
    for file in (directory / "model.safetensors.index.json", *directory.glob("*.safetensors")):
        file.write_bytes(file.read_bytes().replace(b"q_proj", b"q_late"))
    renaming = WeightRenaming(source_patterns="q_late", target_patterns="q_proj")
    monkeypatch.setattr(matching, "get_model_conversion_mapping", lambda model: [renaming])
    names = {tensor.record.name for tensor in load_hf_model(directory).layer_tensors[0]}
    assert "model.layers.0.self_attn.q_late.weight" in names
