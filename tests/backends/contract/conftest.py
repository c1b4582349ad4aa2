"""Kinds of backends, with which the contract's tests run."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_kinds import NAMES, Kind, make_kind


@pytest.fixture(scope="session")
def kind_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(params=NAMES, scope="module")
def kind(request: pytest.FixtureRequest, kind_models: Path) -> Kind:
    return make_kind(request.param, kind_models)


@pytest.fixture
def streamed(kind: Kind) -> Kind:
    if not kind.is_streamed:
        pytest.skip("nothing is read during a pass")
    return kind
