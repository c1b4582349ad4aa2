"""Names of the embedded pair."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specdec.pair import PAIR_NAMES, pair_path


@pytest.mark.parametrize("name", PAIR_NAMES)
def test_the_pair_is_there_and_complete(name: str) -> None:
    files = {path.name for path in pair_path(name).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files


def test_the_pair_is_small() -> None:
    sizes = [(pair_path(name) / "model.safetensors").stat().st_size for name in PAIR_NAMES]
    assert sum(sizes) < 60_000_000


def test_they_share_one_tokenizer() -> None:
    assert len({(pair_path(name) / "tokenizer.json").read_bytes() for name in PAIR_NAMES}) == 1


@pytest.mark.parametrize("name", ["pair:", "pair:oracle", "target"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="known: pair:target, pair:draft, pair:moe"):
        pair_path(name)


def test_the_module_imports_no_heavy_library() -> None:
    code = (
        "import specdec.pair, sys; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
