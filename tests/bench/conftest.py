"""Measurement processes without start-up cost."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from forked import run_forked


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in a fork of a process with all imports, without the kernel's memory limit:
    `--enforce` is tested with the commands of specdec."""

    def run(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        assert command[1] == "-m"
        return SimpleNamespace(code=run_forked(command[2:], env))

    def run_enforced(module: str, argv: list[str], limit: str | int) -> int:
        return run_forked([module, *argv], os.environ)

    monkeypatch.setattr("bench.process.child.run_limited", run)
    monkeypatch.setattr("bench.process.child.run_enforced", run_enforced)
