"""The tiny pair for comparisons with `transformers.generate` (see `reference_decoding`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from specdec.api import LLM


@pytest.fixture(scope="module")
def reference_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from reference_decoding import save_target

    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def reference_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from reference_decoding import save_draft

    return save_draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def reference_model(reference_target: Path) -> Any:
    """The target as loaded by transformers, in fp32."""
    from reference_decoding import load_reference

    return load_reference(reference_target)


@pytest.fixture(scope="module")
def resident(reference_target: Path, reference_draft: Path) -> Iterator[LLM]:
    """Target and draft, wholly in memory."""
    from reference_decoding import load_pair

    with load_pair(reference_target, reference_draft) as llm:
        assert llm.plan.placement.n_streamed_layers == 0
        yield llm
