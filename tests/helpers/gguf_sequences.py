"""Batch-invariant backends of tiny GGUF models with capacity for several sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gguf_models import save_tiny_gguf
from gguf_streaming import placement
from sequence_histories import CONTEXT, MAX_NODES, MAX_SEQS

from backends.contract.exactness import Exactness
from backends.contract.source import BackendOptions
from backends.llama.backend import LlamaBackend
from backends.llama.source import GgufSource

SIZES = {
    "max_context": CONTEXT,
    "max_nodes": MAX_SEQS * MAX_NODES,
    "num_kv_slots": MAX_SEQS * (CONTEXT + MAX_NODES),
    "max_num_seqs": MAX_SEQS,
    "n_threads": 1,
}


def exact_source(family: str, path: Path, **options: Any) -> GgufSource:
    file = save_tiny_gguf(family, path / "m.gguf", n_layers=2, **options)
    source = GgufSource(file, BackendOptions(n_threads=1, is_exact=True))
    assert source.exactness.is_exact, source.exactness
    return source


def filled_up_source(path: Path) -> GgufSource:
    """Return a source with passes of at least eight rows, whatever this process's products need."""
    source = exact_source("llama", path, dtype="Q4_K", hidden=256, feed_forward=256)
    run = replace(source._run, exactness=Exactness(True, min_batch_tokens=8))
    return GgufSource(source.path, BackendOptions(n_threads=1, is_exact=True), run)


def load(source: GgufSource, **options: Any) -> LlamaBackend:
    run = source._run
    types = {"cache_type_k": run.type_k, "cache_type_v": run.type_v}
    if options.pop("is_streamed", False):
        options["placement"] = placement(source.layers)
    else:
        options["load_mode"] = "mmap"
    return LlamaBackend(source.model, **{**SIZES, **types, "exactness": run.exactness, **options})
