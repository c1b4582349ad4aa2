"""Fixtures of the backend tests."""

from __future__ import annotations

from functools import partial

import pytest


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(family, **options) -> GgufModel, written once."""
    from gguf_models import save_tiny_gguf

    from backends.gguf.model import load_gguf_model

    made = {}

    def make(family, **options):
        key = (family, repr(sorted(options.items())))
        if key not in made:
            path = tmp_path_factory.mktemp("gguf") / "m.gguf"
            made[key] = load_gguf_model(save_tiny_gguf(family, path, **options))
        return made[key]

    return make


@pytest.fixture
def paging(monkeypatch):
    """paging(**options): options for all pagers made afterwards; slots are always poisoned."""

    from offload.paging.pager import Pager

    def change(**options):
        pager = partial(Pager, poison=True, **options)
        monkeypatch.setattr("backends.llama.stream.Pager", pager)

    change()
    return change
