"""A tiny target, another model as its draft, and text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_pair import save_model
from training import save_text


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("draft"), seed=2, num_hidden_layers=2)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("text"))
