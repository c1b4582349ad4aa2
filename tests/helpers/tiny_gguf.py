"""Tiny random GGUF files of any architecture that llama.cpp knows.

llama.cpp itself names the tensors of an architecture and their shapes: it makes a model from the
metadata alone (`llama_model_init_from_user`) and asks for the values of each tensor. So a file has
what llama.cpp's own loader of that architecture reads, and only metadata is written here.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tiny_gguf_kinds import ARCHITECTURES, COMMON, OWN_TABLES, WITH_HEADS

VOCAB = 96
N_CTX = 512


_LEFT_OUT = re.compile(r"dense_[23]\.|cls\.|.*\.(lora_[ab]|weight_scale|input_scale|scale)$")
"""Optional tensors: of embedding models and of formats with scales."""
_TABLE_OF_HEAD = re.compile(r"nextn\.(embed_tokens|shared_head_head)\.")


def save_tiny_architecture(name: str, path: Path, *, seed: int = 0, n_ctx: int = N_CTX) -> Path:
    """Write the file of an entry of ARCHITECTURES or WITH_HEADS."""
    head = path.with_suffix(".head")
    kind = (ARCHITECTURES | WITH_HEADS)[name]
    architecture = kind.get("architecture", name)
    metadata = {**COMMON, **{k: v for k, v in kind.items() if k != "architecture"}}
    _write(head, architecture, metadata, {}, n_ctx)
    shapes = _tensor_shapes(head)
    head.unlink()
    rng = np.random.default_rng(seed)
    has_own_tables = name in OWN_TABLES
    names = [x for x in sorted(shapes) if not _LEFT_OUT.match(x)]
    names = [x for x in names if has_own_tables or not _TABLE_OF_HEAD.search(x)]
    tensors = {name: _values(name, shapes[name], rng) for name in names}
    _write(path, architecture, metadata, tensors, n_ctx)
    return path


def _write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    n_ctx: int,
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(n_ctx)
    for key, value in metadata.items():
        full = f"{architecture}.{key.replace('__', '.')}" if key[0] != "/" else key[1:]
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_uint32(full, value)
    add_tokens(writer)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokens(writer: Any, vocab: int = VOCAB) -> None:
    """Add a vocabulary of words."""
    import gguf

    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, vocab))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_merges(["w 3"])
    writer.add_token_list(words)
    writer.add_token_scores([-float(i) for i in range(vocab)])
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (vocab - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(0.3 * values)  # decays
    if "norm" in name and len(shape) == 1 and name.endswith("weight"):
        return 1 + np.float32(0.1) * values
    if len(shape) == 1:
        return np.float32(0.1) * values
    scale = 1.0 if name.startswith("token_embd") else shape[-1] ** -0.5
    return np.float32(scale) * values


def _tensor_shapes(head: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that llama.cpp makes for this metadata, row-major."""
    from backends.ggml.library import LOG, library_folder, load_library
    from backends.ggml.tensor import Tensor

    library = load_library()
    base = ctypes.CDLL(str(library_folder() / "libggml-base.so.0"))
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    base.gguf_free.argtypes = [ctypes.c_void_p]
    shapes: dict[str, tuple[int, ...]] = {}

    def take(address: int, _: object) -> None:
        tensor = Tensor.from_address(address)
        sizes = list(tensor.ne)
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        shapes[tensor.name.decode()] = tuple(sizes[::-1])

    metadata = base.gguf_init_from_file(bytes(head), _InitParams(True, None))
    params = library.llama_model_default_params()
    params.n_gpu_layers, params.use_extra_bufts = 0, False
    params.load_mode, params.load_mtp = library.LLAMA_LOAD_MODE_NONE, True
    callback = library.llama_model_set_tensor_data_t(take)
    LOG.clear()
    model = library.llama_model_init_from_user(metadata, callback, None, params)
    base.gguf_free(metadata)
    assert model, LOG.reason()
    library.llama_model_free(model)
    return shapes


class _InitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]
