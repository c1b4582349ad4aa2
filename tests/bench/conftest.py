"""Processes of measurements that cost no start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from forked import run_forked


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in a fork of a process that has imported all; limits of memory stay the kernel's."""

    def run(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        assert command[1] == "-m"
        return SimpleNamespace(code=run_forked(command[2:], env))

    monkeypatch.setattr("bench.process.child.run_limited", run)
