"""Kinds of backends, with which the contract's tests run."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_kinds import NAMES, STREAMED, Kind, make_kind


@pytest.fixture(scope="session")
def kind_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(params=NAMES, scope="module")
def kind(request: pytest.FixtureRequest, kind_models: Path) -> Kind:
    return make_kind(request.param, kind_models)


@pytest.fixture(params=STREAMED, scope="module")
def streamed(request: pytest.FixtureRequest, kind_models: Path) -> Kind:
    return make_kind(request.param, kind_models)
