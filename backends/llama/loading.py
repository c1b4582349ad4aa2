"""Load a GGUF model with llama.cpp: read, mapped, or mapped without being read."""

from __future__ import annotations

from dataclasses import replace

from backends.contract.backend import UnsupportedModel
from backends.ggml.library import LlamaModel
from backends.gguf.hparams import MAX_CONTEXT, Keys
from backends.gguf.model import GgufModel
from backends.llama.context import ContextOptions
from backends.llama.unread import map_unread
from offload.placement.placement import Placement
from offload.storage.page_cache import dropping_behind
from offload.units import Progress

_LONG_FACTORS = "rope_factors_long"
_SHORT_CONTEXT = "rope.scaling.original_context_length"
LOAD_MODES = ("stream", "mmap", "ram")


def check_options(
    model: GgufModel, options: ContextOptions, placement: Placement | None, load_mode: str
) -> None:
    """Raise ValueError or UnsupportedModel for options that cannot be combined."""
    if load_mode not in LOAD_MODES:
        raise ValueError(f"load_mode {load_mode!r} is not one of {', '.join(LOAD_MODES)}")
    if placement is not None and placement.streams and load_mode != "stream":
        raise ValueError(f"load_mode {load_mode!r} holds the whole model: it takes no placement")
    if options.max_nodes < 1:
        raise ValueError(f"max_nodes must be 1 or more, not {options.max_nodes}")
    n_short = cells_with_short_factors(model, options)
    if n_short is not None and n_short < options.n_cells:
        raise UnsupportedModel(
            f"{model.path} has other rotary factors in a KV cache of more than {n_short} tokens, "
            f"and {options.n_cells} are needed for several sequences: load it for fewer"
        )


def cells_with_short_factors(model: GgufModel, options: ContextOptions) -> int | None:
    """Return the cells above which a cache for several sequences would change the output, as
    llama.cpp chooses rotary factors by the number of cells; None: any number is the same."""
    if not any(name.startswith(_LONG_FACTORS) for name in model.index):
        return None
    keys = Keys(model.path, model.index.metadata, model.architecture)
    n_short = keys.integer(_SHORT_CONTEXT, 1, MAX_CONTEXT, model.max_context)
    n_alone = replace(options, num_kv_slots=None).n_cells
    return n_short if n_alone <= n_short else None


def load_llama_model(
    model: GgufModel,
    load_mode: str,
    options: ContextOptions,
    progress: Progress | None,
    *,
    is_streamed: bool,
    has_head: bool = False,
) -> LlamaModel:
    """Load a model; weights read into memory are dropped from the page cache.

    Raises LlamaError, or UnsupportedModel if it has recurrent layers that the header does not show.
    """
    if is_streamed:
        loaded = map_unread(model, has_head=has_head)
    elif load_mode == "mmap":
        loaded = LlamaModel(model.path, "mmap", progress, has_head=has_head)
    else:
        is_repacked = not options.exactness.is_exact
        with dropping_behind(model.index.paths):
            loaded = LlamaModel(
                model.path, "ram", progress, is_repacked=is_repacked, has_head=has_head
            )
    if loaded.is_recurrent != model.is_recurrent:
        loaded.close()
        raise UnsupportedModel(
            f"llama.cpp and specdec disagree whether {model.path} ({model.architecture}) has "
            "recurrent layers: use llama-cpp-python 0.3.36"
        )
    return loaded
