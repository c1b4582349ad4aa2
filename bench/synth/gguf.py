"""Growth of a small model to a large one's size as one GGUF file, as `checkpoint` does for folders.

Types are llama-quantize's (`bench.synth.recipes`), and so are the bytes of the source's weights,
which ggml quantises. No float copy of the model is made, in memory or on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.synth.checkpoint import GrowReport, fit_shape
from bench.synth.files import check_gguf_file, grown_config, model_card
from bench.synth.gguf_file import GgufTensor, gguf_name, interleave_rotary, write_gguf
from bench.synth.gguf_metadata import add_model, add_tokenizer
from bench.synth.hybrid import tensor_plans
from bench.synth.recipes import RECIPES, Recipe
from bench.synth.shapes import LlamaShape, SynthError
from bench.synth.source import SourceModel
from bench.synth.tensors import EXPERTS, TensorPlan
from bench.synth.weights import TensorMaker
from offload.storage.unfinished import unfinished
from offload.units import Progress

if TYPE_CHECKING:
    from gguf import GGUFWriter

_ROTARY = ("q_proj.weight", "k_proj.weight")


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
    """Write one GGUF file of `shape` that computes the same function as the source.

    The arguments are those of `bench.synth.checkpoint.grow`, but for `out_file`, whose name must
    end in .gguf, and `dtype`, one of `RECIPES`. The quantised weights of the source round its
    function; growing does not change it further.

    Raises:
        SynthError: as `grow` does; also if zeros beside the source's weights would not be exact,
            or for an unsupported tokenizer or rotary embedding.
        LlamaError: llama.cpp, whose ggml quantises, is not installed.
    """
    if dtype not in RECIPES:
        raise SynthError(f"unknown dtype {dtype!r} for GGUF; known: {', '.join(RECIPES)}")
    recipe = RECIPES[dtype]
    out_file = Path(out_file).expanduser().absolute()
    source = SourceModel(Path(source_dir))
    grown = fit_shape(source, shape, vocab_size)
    read = partial(_reader(source), source)
    maker = TensorMaker(read, partial(recipe.format_of, grown), seed)
    model_type = grown_config(source, grown, dtype)["model_type"]
    if grown.mamba is not None and grown.experts is not None:
        model_type += "_moe"
    plans = tensor_plans(source.shape, grown, for_gguf=True)
    tensors = _tensors(plans, grown, model_type, maker, recipe)
    n_bytes = sum(tensor.n_bytes for tensor in tensors)

    def add_metadata(writer: GGUFWriter) -> None:
        name = source_name or source.folder.name
        config = grown_config(source, grown, dtype)
        if grown != source.shape:
            name += f" grown to {grown.parameters / 1e9:.1f} G"
            writer.add_description(model_card(source, grown, dtype, n_bytes, seed, source_name))
        add_model(writer, config, name=name, file_type=recipe.file_type)
        add_tokenizer(writer, source.folder, grown.vocab_size)

    with unfinished(out_file) as path:
        check_gguf_file(out_file, n_bytes if with_data else 0, force)
        try:
            out_file.parent.mkdir(parents=True, exist_ok=True)
            write_gguf(path, add_metadata, tensors, progress, with_data, model_type)
            path.replace(out_file)
        except OSError as error:
            raise SynthError(f"cannot write {out_file}: {error.strerror or error}") from error
    return GrowReport(out_file, grown, grown.parameters, n_bytes, 1)


def _reader(source: SourceModel) -> Callable[[SourceModel, str, range], np.ndarray]:
    """Return the function that reads a source's weights as llama.cpp has them."""
    if source.shape.is_hybrid:
        return _read_decay
    # llama.cpp rotates neighbouring rows of Llamas.
    return _read_interleaved if source.shape.experts is None else SourceModel.read


def _read_decay(source: SourceModel, name: str, rows: range) -> np.ndarray:
    """Return rows; the logarithm of a decay becomes the decay, which is negative."""
    values = source.read(name, rows)
    return -np.exp(values) if name.endswith("A_log") else values


def _read_interleaved(source: SourceModel, name: str, rows: range) -> np.ndarray:
    """Return rows in llama.cpp's order, for which Q and K are read by whole heads."""
    if not name.endswith(_ROTARY):
        return source.read(name, rows)
    size = source.shape.head_dim
    first, n_heads = rows.start // size, -(-rows.stop // size) - rows.start // size
    heads = source.read(name, range(first * size, (first + n_heads) * size))
    skipped = rows.start - first * size
    return interleave_rotary(name, heads, n_heads, n_heads)[skipped : skipped + len(rows)]


def _tensors(
    plans: list[TensorPlan],
    grown: LlamaShape,
    model_type: str,
    maker: TensorMaker,
    recipe: Recipe,
) -> list[GgufTensor]:
    """Return tensors in the order of the plans; a layer's experts share one tensor per matrix."""
    same: dict[str, list[TensorPlan]] = {}
    for plan in plans:
        name = gguf_name(plan.name, model_type, grown.n_layers)
        same.setdefault(name, []).append(plan)
    tensors = []
    for name, parts in same.items():
        form, shape = recipe.format_of(grown, parts[0]), parts[0].shape
        if EXPERTS in parts[0].name:
            shape = (len(parts), *shape)
        if grown.mamba is not None and name.endswith("ssm_norm.weight"):
            shape = (grown.mamba.n_groups, shape[0] // grown.mamba.n_groups)
        if grown.mamba is not None and name.endswith((".ssm_a", ".ssm_d")):
            shape = (*shape, 1)
        n_bytes = sum(map(maker.n_bytes, parts))
        chunks = partial(_chunks, maker, parts)
        tensors.append(GgufTensor(name, shape, form.name, n_bytes, chunks))
    return tensors


def _chunks(maker: TensorMaker, parts: list[TensorPlan]) -> Iterator[memoryview]:
    return chain.from_iterable(map(maker.chunks, parts))
