"""Models of Python packages are out of sight, whatever is installed beside the tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_packaged_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.models.local_models.PACKAGED", {})
