"""EAGLE-3 heads and the states that they take, by llama.cpp's own graphs (through ctypes).

The functions of llama.cpp's extension header have C++ names and may be gone in another version.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from backends.ggml.library import LOG, is_installed, library_folder, load_library

_FLOATS = ctypes.POINTER(ctypes.c_float)
_LAYER_INPUT = "_Z30llama_%s_embeddings_layer_inpP13llama_contextj"
_NEXT = "_Z26llama_%s_embeddings_nextnP13llama_context"


def has_extensions() -> bool:
    """Return whether the installed llama.cpp has what this module calls."""
    if not is_installed():
        return False
    extensions = ctypes.CDLL(str(library_folder() / "libllama.so"))
    names = (_LAYER_INPUT % "set" + "b", _LAYER_INPUT % "get", _NEXT % "set" + "bb", _NEXT % "get")
    return all(hasattr(extensions, name) for name in names)


def layer_inputs(path: Path, token_ids: Sequence[int], layers: Sequence[int]) -> np.ndarray:
    """Return the inputs of a model's layers side by side: float32 [n, layers * hidden]."""
    library = load_library()
    with _context(path) as (context, n_embd):
        for layer in layers:
            _function(_LAYER_INPUT % "set" + "b", None)(context, layer, True)
        with llama_batch(token_ids, 0) as batch:
            assert library.llama_decode(context, batch) == 0
        get = _function(_LAYER_INPUT % "get", _FLOATS)
        shape = (len(token_ids), n_embd)
        parts = [np.ctypeslib.as_array(get(context, layer), shape) for layer in layers]
        return np.concatenate(parts, axis=1)


class LlamaHead:
    """A head with its own embedding, in a context of its own."""

    def __init__(self, context: Any, n_embd: int, n_vocab: int) -> None:
        self._context, self._n_embd, self._n_vocab = context, n_embd, n_vocab

    def fused(self, states: np.ndarray) -> np.ndarray:
        """Return g [n, hidden] of the target's states [n, layers * hidden]."""
        with llama_batch([0] * len(states), 0, states, has_tokens=False) as batch:
            assert load_library().llama_encode(self._context, batch) == 0
        return self._states(len(states))

    def run(
        self, token_ids: Sequence[int], start: int, g: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return logits [n, vocab] and the states to go on from [n, hidden]."""
        library = load_library()
        with llama_batch(token_ids, start, g) as batch:
            assert library.llama_decode(self._context, batch) == 0
        pointer = library.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(pointer, (len(token_ids), self._n_vocab)).copy()
        return logits, self._states(len(token_ids))

    def _states(self, n: int) -> np.ndarray:
        return next_states(self._context, n, self._n_embd)


def next_states(context: Any, n: int, n_embd: int) -> np.ndarray:
    """Return what a head's graph has for its next run, float32 [n, hidden]."""
    pointer = _function(_NEXT % "get", _FLOATS)(context)
    return np.ctypeslib.as_array(pointer, (n, n_embd)).copy()


@contextmanager
def llama_context(path: Path) -> Iterator[Any]:
    """Load a head whose passes have `next_states`."""
    with _context(path) as (context, _):
        _function(_NEXT % "set" + "bb", None)(context, True, False)
        yield context


@contextmanager
def llama_head(path: Path) -> Iterator[LlamaHead]:
    library = load_library()
    with _context(path) as (context, n_embd):
        _function(_NEXT % "set" + "bb", None)(context, True, False)
        model = library.llama_get_model(context)
        n_vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        yield LlamaHead(context, n_embd, n_vocab)


@contextmanager
def _context(path: Path) -> Iterator[tuple[Any, int]]:
    library = load_library()
    params = library.llama_model_default_params()
    params.n_gpu_layers = 0
    model = library.llama_model_load_from_file(str(path).encode(), params)
    assert model, LOG.reason()
    options = library.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 64
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = 0  # GGML_TYPE_F32
    options.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = library.llama_init_from_model(model, options)
    assert context, LOG.reason()
    try:
        yield context, library.llama_model_n_embd(model)
    finally:
        library.llama_free(context)
        library.llama_model_free(model)


@contextmanager
def llama_batch(
    token_ids: Sequence[int],
    start: int,
    states: np.ndarray | None = None,
    *,
    has_tokens: bool = True,
) -> Iterator[Any]:
    """Yield a batch of tokens, of rows of numbers, or of both as a head's decoder takes them."""
    library = load_library()
    batch = library.llama_batch_init(len(token_ids), 0, 1)
    tokens, rows = batch.token, None
    batch.n_tokens = len(token_ids)
    for i, token_id in enumerate(token_ids):
        batch.token[i], batch.pos[i], batch.logits[i] = token_id, start + i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    if states is not None:
        rows = np.ascontiguousarray(states, dtype=np.float32)
        batch.embd = rows.ctypes.data_as(_FLOATS)
    if not has_tokens:
        batch.token = ctypes.POINTER(ctypes.c_int32)()
    try:
        yield batch
    finally:
        batch.token, batch.embd = tokens, _FLOATS()  # the rows are numpy's
        library.llama_batch_free(batch)


def _function(name: str, result: Any) -> Any:
    function = getattr(ctypes.CDLL(str(library_folder() / "libllama.so")), name)
    kinds = {"j": ctypes.c_uint32, "b": ctypes.c_bool}
    arguments = name.rpartition("llama_context")[2]
    function.argtypes = [ctypes.c_void_p, *(kinds[kind] for kind in arguments)]
    function.restype = result
    return function
