"""A small model for all tests of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_pair import save_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("peers") / "target", seed=1)
