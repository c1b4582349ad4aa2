"""Names of the embedded pair."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import specdec
from specdec.pair import PAIR_GGUF_NAMES, PAIR_HEAD_NAMES, PAIR_NAMES, pair_path


@pytest.mark.parametrize("name", PAIR_NAMES)
def test_the_pair_is_there_and_complete(name: str) -> None:
    files = {path.name for path in pair_path(name).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files


def test_its_heads_are_there_and_take_4_mib_together() -> None:
    n_bytes = 0
    for name in PAIR_HEAD_NAMES:
        files = {path.name for path in pair_path(name).iterdir()}
        assert files == {
            "config.json",
            "eval_results.json",
            "model.safetensors",
            "README.md",
        }
        n_bytes += (pair_path(name) / "model.safetensors").stat().st_size
        assert "_name_or_path" not in (pair_path(name) / "config.json").read_text()
    assert n_bytes <= 4 << 20


@pytest.mark.parametrize("name", PAIR_HEAD_NAMES)
def test_its_heads_draft_for_its_target(name: str) -> None:
    prompt, asked = "def add(a, b):\n    return a", {"max_tokens": 64, "ignore_eos": True}
    options = {"spec_type": "draft", "num_draft_tokens": 15, "draft_depth": 6, "ctx_size": 128}
    with specdec.load("pair:target", name, **options) as llm:
        result = llm.generate(prompt, **asked)
        assert result.token_ids == llm.generate(prompt, speculative=False, **asked).token_ids
        assert result.stats.mean_acceptance_length > 1.7


def test_the_pair_is_small() -> None:
    files = [pair_path(name) / "model.safetensors" for name in PAIR_NAMES]
    assert sum(file.stat().st_size for file in files) < 70_000_000
    assert files[-1].parent.name == "hybrid"
    assert files[-1].stat().st_size < 12_000_000
    assert sum(pair_path(name).stat().st_size for name in PAIR_GGUF_NAMES) < 30_000_000


def test_they_share_one_tokenizer() -> None:
    assert len({(pair_path(name) / "tokenizer.json").read_bytes() for name in PAIR_NAMES}) == 1


@pytest.mark.parametrize("name", ["pair:", "pair:oracle", "target", "pair:moe.gguf"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"pair:hybrid, pair:mtp, pair:dflash, pair:target\.gguf"):
        pair_path(name)


def test_a_misspelt_name_comes_with_the_near_one() -> None:
    with pytest.raises(
        ValueError, match="'pair:targt'; did you mean pair:target\\? Known: pair:tar"
    ):
        pair_path("pair:targt")


def test_the_module_imports_no_heavy_library() -> None:
    code = (
        "import specdec.pair, sys; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_wheel_holds_the_pair() -> None:
    pytest.importorskip("hatchling")
    from hatchling.builders.wheel import WheelBuilder

    root = Path(__file__).resolve().parents[3]
    pinned = {item.distribution_path for item in WheelBuilder(str(root)).recurse_included_files()}
    files = [name.removeprefix("pair:") for name in PAIR_GGUF_NAMES]
    folders = [name.removeprefix("pair:") for name in (*PAIR_NAMES, *PAIR_HEAD_NAMES)]
    files += [f"{folder}/model.safetensors" for folder in folders]
    assert {f"specdec/pair/{file}" for file in files} <= pinned
