"""llama.cpp's own quantisation of a whole GGUF file, without an importance matrix."""

from __future__ import annotations

import ctypes
from pathlib import Path

from backends.ggml.library import load_library
from bench.synth.gguf import grow_gguf
from bench.synth.shapes import LlamaShape


def llama_quantize(floats: Path, out: Path, dtype: str) -> Path:
    """Write `floats` in a file type of llama-quantize, for example q4_k_m."""
    library = load_library()
    params = library.llama_model_quantize_default_params()
    name = {"mxfp4": "MXFP4_MOE"}.get(dtype, dtype.upper())
    params.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{name}")
    params.nthread = 1
    paths = str(floats).encode(), str(out).encode()
    assert library.llama_model_quantize(*paths, ctypes.byref(params)) == 0, (floats, dtype)
    return out


def both_types(source: Path, tmp_path: Path, shape: LlamaShape, dtype: str) -> list[dict[str, str]]:
    """Return the types of tensors of a grown file: as written, and as llama.cpp quantises one of
    floats."""
    import gguf

    own, floats = (
        grow_gguf(source, tmp_path / f"{kind}.gguf", shape, dtype=kind, with_data=False).path
        for kind in (dtype, "fp32")
    )
    llama = llama_quantize(floats, tmp_path / "llama.gguf", dtype)
    return [
        {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
        for path in (own, llama)
    ]
