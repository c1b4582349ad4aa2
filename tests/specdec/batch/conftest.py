"""A file of eight prompts, and the paths of the output."""

from __future__ import annotations

from pathlib import Path

import pytest
from batches import write_prompts


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.jsonl", 8)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"
