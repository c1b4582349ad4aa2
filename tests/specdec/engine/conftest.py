"""A small model, streamed and in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forced_streaming import force_streaming
from many_sequences import load
from tiny_pair import save_model

import specdec
from specdec.api import LLM


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(params=["streamed", "resident"])
def small_llm(request: Any, small_target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    if request.param == "streamed":
        force_streaming(monkeypatch)
    # Capacity for beams: otherwise it is that of the planned tree, by measured speeds.
    with specdec.load(small_target, ctx_size=256, num_beams=3) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The pair of `many_sequences`, for sequences alone."""
    with load(tmp_path_factory) as llm:
        yield llm
