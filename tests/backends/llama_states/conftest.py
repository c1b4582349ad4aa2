"""Tiny recurrent models on llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np
    from recurrent_models import CountRows, Load

    from backends.llama.recurrent_backend import RecurrentLlamaBackend
    from backends.llama.source import GgufSource
    from offload.placement.placement import Placement


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GgufSource]:
    """Return the source of a tiny model of an architecture; it is written once."""
    from tiny_gguf import save_tiny_architecture

    from backends.contract.source import BackendOptions
    from backends.llama.source import GgufSource

    folder, opened = tmp_path_factory.mktemp("recurrent"), {}

    def get(name: str) -> GgufSource:
        if name not in opened:
            path = save_tiny_architecture(name, folder / f"{name}.gguf")
            opened[name] = GgufSource(path, BackendOptions(n_threads=1, is_exact=True))
        return opened[name]

    return get


@pytest.fixture
def load(source: Callable[[str], GgufSource]) -> Load:
    """Load a tiny model of an architecture, streamed if it gets a placement."""
    from backends.llama.recurrent_backend import RecurrentLlamaBackend

    def make(name: str, placement: Placement | None = None, **options: Any) -> Any:
        opened = source(name)
        run = opened._run
        return RecurrentLlamaBackend(
            opened.model,
            placement=placement,
            load_mode="mmap" if placement is None else "stream",
            **{
                "n_threads": 1,
                "cache_type_k": run.type_k,
                "cache_type_v": run.type_v,
                "max_context": 60,
                "max_nodes": 80,
                "num_kv_slots": 380,
                "exactness": run.exactness,
                **options,
            },
        )

    return make


@pytest.fixture
def count_rows(monkeypatch: pytest.MonkeyPatch) -> CountRows:
    """Return a list that takes the number of rows of each pass from now on."""

    def count(backend: RecurrentLlamaBackend) -> list[int]:
        rows: list[int] = []
        decode = backend._run

        def run(batch: Any) -> np.ndarray:
            rows.append(batch.n_tokens)
            return decode(batch)

        monkeypatch.setattr(backend, "_run", run)
        return rows

    return count
