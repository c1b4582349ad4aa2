"""GGUF targets with an MTP head: the pair as specdec loads it, and as llama.cpp runs it alone."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from backends.contract.source import BackendOptions, Loading
from backends.ggml.library import LlamaModel, load_shared_library
from backends.heads.opened import mtp_source
from backends.llama.context import CACHE_TYPES
from backends.llama.source import GgufSource
from offload.placement.placement import Placement
from offload.placement.plan import pin_all

SIZES: dict[str, Any] = {"max_context": 64, "max_nodes": 40, "max_num_tokens": 40}


def open_pair(path: Path, *, is_exact: bool = True) -> tuple[GgufSource, Any]:
    target = GgufSource(path, BackendOptions(n_threads=1, is_exact=is_exact))
    return target, mtp_source(target, BackendOptions(n_threads=1))


@contextmanager
def loaded_pair(
    path: Path, *, is_streamed: bool = False, is_exact: bool = True
) -> Iterator[tuple[Any, Any]]:
    """Yield the backends of a target and of its head."""
    target, head = open_pair(path, is_exact=is_exact)
    layers = target.model.layers
    placement = Placement(layers, 2) if is_streamed else Placement(pin_all(layers), 0)
    how = "stream" if is_streamed else "mmap"
    with target.load(Loading(placement, **SIZES, load_mode=how, has_head=True)) as backend:
        head.share_weights(backend)
        with head.load(Loading(Placement((), 0), **SIZES, load_mode="ram")) as drafting:
            yield backend, drafting


class PlainPair:
    """llama.cpp's own context of a model and MTP context, one sequence in each, driven as its
    speculative decoding does."""

    def __init__(self, path: Path, cache_type: str) -> None:
        self._model = LlamaModel(path, "mmap", has_head=True)
        self._library = library = self._model.library
        self._width = library.llama_model_n_embd(self._model.handle)
        params = library.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
        params.n_outputs_max = 256
        self._contexts = []
        for kind, name in ((0, cache_type), (library.LLAMA_CONTEXT_TYPE_MTP, "f16")):
            params.ctx_type, params.type_k, params.type_v = kind, *[CACHE_TYPES[name]] * 2
            self._contexts.append(library.llama_init_from_model(self._model.handle, params))
        shared = load_shared_library()
        enable = shared._Z26llama_set_embeddings_nextnP13llama_contextbb
        enable.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        self._row = shared._Z30llama_get_embeddings_nextn_ithP13llama_contexti
        self._row.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        self._row.restype = ctypes.POINTER(ctypes.c_float)
        for context, only_with_logits in zip(self._contexts, (False, True), strict=True):
            enable(context, True, only_with_logits)

    def target(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the hidden states [n, width] of the first tokens of a sequence."""
        return self._run(0, token_ids, 0, None)[1]

    def head(
        self, token_ids: Sequence[int], position: int, states: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (logits, hidden states) after more tokens, from this position on."""
        return self._run(1, token_ids, position, states)

    def _run(
        self, which: int, token_ids: Sequence[int], position: int, states: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        library, context, n = self._library, self._contexts[which], len(token_ids)
        batch = library.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(token_ids):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        if states is not None:
            rows = np.ascontiguousarray(states, dtype=np.float32)
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        assert library.llama_decode(context, batch) == 0
        if states is not None:
            batch.embd = None
        library.llama_batch_free(batch)
        logits = np.ctypeslib.as_array(
            library.llama_get_logits(context), (n, self._model.vocab_size)
        ).copy()
        own = [np.ctypeslib.as_array(self._row(context, i), (self._width,)) for i in range(n)]
        return logits, np.stack(own)

    def close(self) -> None:
        for context in self._contexts:
            self._library.llama_free(context)
        self._model.close()
