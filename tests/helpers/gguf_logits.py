"""Logits of a GGUF file by llama.cpp itself, with as little of this project as possible."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from backends.ggml.library import load_library


def gguf_logits(path: Path, token_ids: Sequence[int]) -> np.ndarray:
    """Return float32 [n, vocab], after each token; K and V in float32."""
    library = load_library()
    params = library.llama_model_default_params()
    params.n_gpu_layers = 0
    model = library.llama_model_load_from_file(str(path).encode(), params)
    assert model, path
    options = library.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = 0  # GGML_TYPE_F32
    options.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = library.llama_init_from_model(model, options)
    n_vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    batch = library.llama_batch_init(len(token_ids), 0, 1)
    try:
        batch.n_tokens = len(token_ids)
        for i, token_id in enumerate(token_ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token_id, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert library.llama_decode(context, batch) == 0
        pointer = library.llama_get_logits(context)
        return np.ctypeslib.as_array(pointer, (len(token_ids), n_vocab)).copy()
    finally:
        library.llama_batch_free(batch)
        library.llama_free(context)
        library.llama_model_free(model)
