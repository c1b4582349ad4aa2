"""Impossible values in config.json: one line with the value and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoints import save_tiny_checkpoint

from backends.checkpoint.config import load_config
from backends.contract.backend import UnsupportedModel
from backends.hf.loading import load_hf_model
from offload.errors import SpecdecError

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "big"}, 'hidden_size is "big"'),
    ({"num_attention_heads": None}, "num_attention_heads is null"),
    ({"num_attention_heads": 7, "head_dim": None}, "not a multiple of .* heads .7."),
    ({"hidden_act": 5}, "cannot be read: Field 'hidden_act' expected str, got int"),
    ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
    ({"model_type": ["llama"]}, r'model_type is \["llama"\], must be a string'),
    ({"rope_parameters": {"rope_type": ["default"]}}, r'rope_type \["default"\] is not known'),
    ({"rope_parameters": {"rope_type": "magic"}}, 'rope_type "magic" is not known'),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_checkpoint("llama", tmp_path_factory.mktemp("bad"))
    return directory / "config.json"


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[text for _, text in WRONG])
def test_a_wrong_value_is_named_with_the_remedy(
    config: Path, values: dict[str, Any], message: str
) -> None:
    good = config.read_text()
    config.write_text(json.dumps({**json.loads(good), **values}))
    try:
        with pytest.raises(SpecdecError, match=f"{message}.*: fix .*download") as caught:
            load_hf_model(config.parent)
    finally:
        config.write_text(good)
    assert "\n" not in str(caught.value)
    assert "alidation error" not in str(caught.value)


def test_weights_of_another_file_than_the_usual_one(config: Path) -> None:
    good = config.read_text()
    for name in ("model.safetensors.index.json", "other.safetensors"):
        config.write_text(json.dumps({**json.loads(good), "transformers_weights": name}))
        try:
            if name.startswith("model"):
                assert load_hf_model(config.parent).layers
                continue
            with pytest.raises(SpecdecError, match='from "other.safetensors" .*: rename'):
                load_hf_model(config.parent)
        finally:
            config.write_text(good)


def test_an_encoder_is_no_recurrent_model(config: Path) -> None:
    good = config.read_text()
    config.write_text(json.dumps({**json.loads(good), "model_type": "bert"}))
    try:
        with pytest.raises(SpecdecError, match=r"an encoder \(bert\)"):
            load_hf_model(config.parent)
    finally:
        config.write_text(good)


def test_code_of_a_checkpoint_is_never_run(tmp_path, monkeypatch):
    """Remote code is not run even if transformers would ask on the terminal and get a yes."""
    ran = tmp_path / "ran"
    (tmp_path / "configuration_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(SpecdecError) as failure:
        load_config(tmp_path)
    assert "\n" not in str(failure.value)
    assert not ran.exists()


def test_sparse_attention_of_unknown_reach_is_refused(tmp_path: Path) -> None:
    transformers.Qwen4ExpTextConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="does not say to how many tokens it attends"):
        load_config(tmp_path)
