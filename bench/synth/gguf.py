"""Grows a small Llama to a large one's size as one GGUF file, as `checkpoint` does for folders.

Types follow llama-quantize: norms in F32; with Q4_0 the output head (a tied embedding is one too)
in Q6_K, or in Q8_0 where its rows do not fill Q6_K's blocks; everything else as asked.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.synth.checkpoint import GrowReport, fit_shape
from bench.synth.files import check_gguf_file, grown_config, model_card
from bench.synth.formats import BF16, F16, F32, Q4_0, Q6_K, Q8_0, WeightFormat
from bench.synth.growth import GrowthPlanner, TensorPlan
from bench.synth.shapes import LlamaShape, SynthError
from bench.synth.source import SourceModel
from bench.synth.unfinished import unfinished
from bench.synth.weights import TensorMaker
from offload.units import Progress
from specdec.pair.gguf_file import (
    GgufTensor,
    gguf_name,
    interleave_rotary,
    write_gguf,
)
from specdec.pair.gguf_metadata import add_model, add_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

GGUF_FORMATS = {"q4_0": Q4_0, "q8_0": Q8_0, "f16": F16, "bf16": BF16, "fp32": F32}


def grow_gguf(
    source_dir: Path,
    out_file: Path,
    shape: LlamaShape,
    *,
    vocab_size: int | None = None,
    dtype: str = "q4_0",
    seed: int = 0,
    force: bool = False,
    source_name: str | None = None,
    progress: Progress | None = None,
    with_data: bool = True,
) -> GrowReport:
    """Writes one GGUF file of `shape` that computes the same function as the source.

    The arguments are those of `bench.synth.checkpoint.grow`, but for `out_file`, whose name must
    end in .gguf, and `dtype`, one of `GGUF_FORMATS`. The quantised weights of the source round its
    function; growing does not change it further.

    Raises:
        SynthError: as `grow` does; also if rows do not fill whole blocks.
        GgufExportError: a tokenizer or rotary embedding that is not written here.
    """
    if dtype not in GGUF_FORMATS:
        raise SynthError(f"unknown dtype {dtype!r} for GGUF; known: {', '.join(GGUF_FORMATS)}")
    out_file = Path(out_file).expanduser().absolute()
    source = SourceModel(Path(source_dir))
    grown = fit_shape(source, shape, vocab_size)
    maker = TensorMaker(
        partial(_read_interleaved, source), partial(_format_of, GGUF_FORMATS[dtype], grown), seed
    )
    tensors = _tensors(GrowthPlanner(source.shape, grown).tensors(), grown, maker, dtype)
    n_bytes = sum(tensor.n_bytes for tensor in tensors)

    def add_metadata(writer: GGUFWriter) -> None:
        name = f"{source_name or source.folder.name} grown to {grown.parameters / 1e9:.1f} G"
        file_type = "ALL_F32" if dtype == "fp32" else f"MOSTLY_{dtype.upper()}"
        add_model(writer, grown_config(source, grown, dtype), name=name, file_type=file_type)
        card = model_card(source, grown, dtype, n_bytes, seed, source_name)
        writer.add_description(card)
        add_tokenizer(writer, source.folder, grown.vocab_size)

    with unfinished(out_file) as path:
        check_gguf_file(out_file, n_bytes if with_data else 0, force)
        try:
            out_file.parent.mkdir(parents=True, exist_ok=True)
            write_gguf(path, add_metadata, tensors, progress, with_data)
            path.replace(out_file)
        except OSError as error:
            raise SynthError(f"cannot write {out_file}: {error.strerror or error}") from error
    return GrowReport(out_file, grown, grown.parameters, n_bytes, 1)


def head_format(form: WeightFormat, n_columns: int) -> WeightFormat:
    """What llama-quantize stores an output head in."""
    if form is not Q4_0:
        return form
    return Q8_0 if n_columns % Q6_K.block_size else Q6_K


def _format_of(form: WeightFormat, grown: LlamaShape, plan: TensorPlan) -> WeightFormat:
    if len(plan.shape) == 1:
        return F32
    head = "model.embed_tokens.weight" if grown.tied else "lm_head.weight"
    return head_format(form, grown.hidden_size) if plan.name == head else form


def _read_interleaved(source: SourceModel, name: str) -> np.ndarray:
    shape = source.shape
    return interleave_rotary(name, source.read(name), shape.n_heads, shape.n_kv_heads)


def _tensors(
    plans: list[TensorPlan], grown: LlamaShape, maker: TensorMaker, dtype: str
) -> list[GgufTensor]:
    tensors = []
    for plan in plans:
        name = gguf_name(plan.name)
        assert name is not None
        form = _format_of(GGUF_FORMATS[dtype], grown, plan)
        n_bytes, chunks = maker.n_bytes(plan), partial(maker.chunks, plan)
        tensors.append(GgufTensor(name, plan.shape, form.name, n_bytes, chunks))
    return tensors
