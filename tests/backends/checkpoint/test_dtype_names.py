"""Types of numbers that a config.json names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.checkpoint.config import load_config
from offload.formats.tensors import CheckpointError


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_type_that_is_none_is_told(key: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", key: "float13"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f'{key} is "float13", must be float32') as error:
        load_config(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_other_types_are_read(name: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": "llama", "dtype": name, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path).model_type == "llama"
