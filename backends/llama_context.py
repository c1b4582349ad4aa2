"""The llama.cpp context that a backend asks for."""

from __future__ import annotations

from backends.llama_lib import MAX_SEQUENCES, ContextOptions, default_threads

PREFILL_ROWS = 512
"""Tokens of a prompt that go through the layers together. A streamed model is read once for so
many; llama.cpp's compute buffers grow with it."""
MAX_LEAVES = MAX_SEQUENCES - 1  # one sequence is for looking at a graph
_CELL_STEP = 256


def context_options(
    max_context: int,
    max_nodes: int,
    n_threads: int | None = None,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    flash_attention: bool | None = None,
    max_outputs: int | None = None,
) -> ContextOptions:
    """The llama.cpp context of a backend: a cell per token of the context."""
    n_rows = max(max_nodes, min(max_context, PREFILL_ROWS))
    return ContextOptions(
        # llama.cpp pads to this; live nodes use what the prefix leaves (see node_room).
        n_cells=-(-max(max_context, max_nodes) // _CELL_STEP) * _CELL_STEP,
        max_rows=n_rows,
        max_outputs=max_outputs or max_nodes,
        n_sequences=min(max(max_nodes, 2), MAX_LEAVES) + 1,
        n_threads=n_threads or default_threads(),
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attention=flash_attention,
    )
