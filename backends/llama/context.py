"""The llama.cpp context that a backend asks for, and what it refuses."""

from __future__ import annotations

from backends.contract.backend import UnsupportedModel
from backends.llama.library import MAX_SEQUENCES, ContextOptions, default_threads
from backends.llama.model import GgufModel
from offload.residency.placement import Placement

LOAD_MODES = ("stream", "mmap", "ram")

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


def recurrent_model(model: GgufModel) -> UnsupportedModel:
    return UnsupportedModel(
        f"{model.path} ({model.architecture}) keeps a recurrent state, which cannot be rolled back "
        "to an earlier token: use a model with attention in every layer"
    )


def check_options(
    model: GgufModel, max_nodes: int, residency: Placement | None, load_mode: str
) -> None:
    """Raise for a backend that cannot be."""
    if load_mode not in LOAD_MODES:
        raise ValueError(f"load_mode {load_mode!r} is not one of {', '.join(LOAD_MODES)}")
    if residency is not None and residency.n_slots and load_mode != "stream":
        raise ValueError(f"load_mode {load_mode!r} holds the whole model: it takes no residency")
    if max_nodes < 1:
        raise ValueError(f"max_nodes must be 1 or more, not {max_nodes}")
    if model.is_recurrent:
        raise recurrent_model(model)
