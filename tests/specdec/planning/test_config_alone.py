"""Plans of a folder with a config.json and no weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.contract.backend import UnsupportedModel
from offload.formats.checkpoint import WeightIndex
from specdec.cli.app import main
from specdec.models import outlines
from specdec.models.names import resolve_model
from specdec.models.outlines import planned_model

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(outlines, "_outlines", {})


def config_folder(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_70b_is_planned_from_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_folder(tmp_path / "llama", **LLAMA_70B)
    assert main(["plan", "-m", str(folder), "--on", "laptop", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["predicted_tokens_per_second"] < 0.2
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["config.json"]


def test_the_tensors_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    target = resolve_model("pair:target")
    config = json.loads((target / "config.json").read_text())
    path = planned_model(config_folder(tmp_path / "target", **config))
    actual, expected = (WeightIndex.from_directory(x) for x in (path, target))
    assert {r.name: (r.dtype, r.shape) for r in actual.values()} == {
        r.name: (r.dtype, r.shape) for r in expected.values()
    }


def test_a_quantised_config_is_refused(tmp_path: Path) -> None:
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 128}
    folder = config_folder(tmp_path / "awq", **LLAMA_70B, quantization_config=quantised)
    with pytest.raises(UnsupportedModel, match="quantised weights and no weights"):
        planned_model(folder)
