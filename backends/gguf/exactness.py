"""Batch invariance of a GGUF model in llama.cpp: whether it can be exact, and with which settings.

Four things decide it:

- Products. Some formats have different kernels for few rows and for many; then passes are padded to
  the size from which one kernel serves all (`min_batch_tokens`). Experts cannot be padded: how many
  rows an expert gets depends on the other rows. A mixture runs without the kernels for many rows
  (backends/ggml/tiles.py).
- Attention. llama.cpp sums over the cells of the cache in their order and skips those that a row
  does not see, but not with keys and values in f16, for which it has different kernels for one
  row and for many: with keys in bf16 there is one kernel. Values in f16 take it half the time of
  those in bf16, whose sums it makes in float32 (docs/benchmarks.md).
- Cells. They must be in the order of positions: see cells.py.
- Layouts. A model "in ram" is repacked for the processor, and repacked formats sum in another
  order (measured: Q4_0, Q4_K; Q8_0 kept its bits). An exact backend keeps the file's layout, so
  that the budget changes no bits. On two cores with AVX2, passes of 1, 8 and 32 rows then took
  2.1, 1.6 and 1.4 times as long for Q4_0 and 1.0, 2.0 and 1.1 times as long for Q4_K.

The first two are tested on the model's formats and shapes (backends/ggml/batch_invariance.py), once
per machine, version of llama.cpp and number of threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from backends.contract.cached_checks import CachedChecks
from backends.contract.exactness import Exactness
from backends.ggml.batch_invariance import (
    CANDIDATES,
    Attention,
    Product,
    attention_runs,
    fewer_outputs,
    find_min_batch_tokens,
    product_runs,
)
from backends.ggml.library import llama_version, load_library
from backends.ggml.operators import load_ggml
from backends.ggml.tiles import kernels_in_use
from backends.gguf.hparams import CACHE_TYPES
from backends.gguf.model import GgufModel
from offload.formats.gguf_header import GGML_TYPES
from offload.formats.part import read_part
from offload.formats.tensors import TensorRecord
from offload.process.cpus import thread_counts

_TYPE_IDS = {kind.name: number for number, kind in GGML_TYPES.items()}
_MAX_FILE_BLOCKS = 64
_SLOW_TO_MAKE = ("IQ1", "IQ2", "IQ3")
"""Formats for which ggml needs seconds to build tables: their blocks come from the file."""
_CHOICES = (("f16", "f16"), ("bf16", "f16"), ("bf16", "bf16"))
"""Types of keys and values to try, as far as the user names none."""


@dataclass(frozen=True)
class ExactRun:
    """Settings with which a model is batch-invariant, or the reason why it cannot be."""

    exactness: Exactness
    type_k: str
    type_v: str


def find_exact_run(
    model: GgufModel, n_threads: int, type_k: str | None, type_v: str | None
) -> ExactRun:
    """Find the settings; takes 0.1 s for a small model and a few seconds for a large one, then
    the result is in the disk cache.

    type_k, type_v: types of the KV cache that the user wants; None: chosen here.
    """
    likely = ExactRun(Exactness(False), type_k or _CHOICES[0][0], type_v or _CHOICES[0][1])
    if reason := _refusal(model):
        return _not_exact(likely, reason)
    run = likely
    for threads in dict.fromkeys([thread_counts(n_threads), (n_threads,)]):
        run = _try_run(model, threads, likely, (type_k, type_v))
        if run.exactness.is_exact:
            return replace(run, exactness=replace(run.exactness, is_thread_invariant=1 in threads))
    return run


def _try_run(
    model: GgufModel,
    threads: Sequence[int],
    likely: ExactRun,
    types: tuple[str | None, str | None],
) -> ExactRun:
    """threads: thread counts that passes may have, each of which is tested."""
    checks = _Checks(threads)
    try:
        num_tokens, many_rows = 1, ""
        for product, record in _products(model, max(threads)):
            min_rows = checks.product(product, record)
            if min_rows is None:
                reason = _product_reason(record, product.has_experts)
                if not product.has_experts:
                    return _not_exact(likely, reason)
                many_rows = many_rows or reason
            num_tokens = max(num_tokens, min_rows or 1)
        run = _with_cache_types(model, checks, likely, num_tokens, types)
        # Still use the best cache types: attention can be batch-invariant even if experts are not.
        return _not_exact(run, many_rows) if many_rows else run
    finally:
        checks.save()


def _with_cache_types(
    model: GgufModel,
    checks: _Checks,
    likely: ExactRun,
    num_tokens: int,
    requested: tuple[str | None, str | None],
) -> ExactRun:
    for choice in _CHOICES:
        type_k, type_v = (name or own for name, own in zip(requested, choice, strict=True))
        min_rows = [checks.attention(kind) for kind in _attentions(model, type_k, type_v)]
        if None not in min_rows:
            min_count = max([num_tokens, *(n for n in min_rows if n is not None)])
            return ExactRun(Exactness(True, min_batch_tokens=min_count), type_k, type_v)
    names = sorted({name for name in requested if name})
    if not names:
        return _not_exact(likely, "its attention sums in an order that depends on the pass")
    return _not_exact(
        likely,
        f"a KV cache of {' and '.join(names)} is summed in another order for one row than for "
        "many: leave out --cache-type-k and --cache-type-v",
    )


def _not_exact(run: ExactRun, reason: str) -> ExactRun:
    return ExactRun(Exactness(False, reason), run.type_k, run.type_v)


def _refusal(model: GgufModel) -> str:
    """Return why a model's architecture rules out batch invariance; empty if it does not."""
    shapes = model.kv_shape.layers
    if any(layer.index_length for layer in shapes):
        return f"{model.architecture} chooses the tokens that it attends to by an index"
    if any(layer.value_length == 0 for layer in shapes):
        return "attention to compressed keys (MLA) has not been compared to the bit"
    if any(layer.value_length != layer.key_length for layer in shapes):
        return (
            "keys and values of different lengths run without flash attention, which sums in an "
            "order that depends on the other rows"
        )
    return ""


def _product_reason(record: TensorRecord, has_experts: bool) -> str:
    if has_experts:
        are_tiles_left_out = bool(kernels_in_use())
        remedy = (
            "use a file in Q4_0 or Q8_0"
            if are_tiles_left_out
            else "start a fresh process, without GGML_CPU_TILED_MM in its environment"
        )
        return (
            f"experts in {record.dtype} are summed in another order where a pass sends them many "
            f"rows: {remedy}"
        )
    return f"on this machine, products of {record.dtype} depend on the other rows of a pass"


def _products(model: GgufModel, n_threads: int) -> Iterator[tuple[Product, TensorRecord]]:
    """Yield each kind of product once, with a tensor of that kind."""
    seen = set()
    inner = (record for layer in model.layers for record in layer.tensors)
    for record in (*inner, *model.resident_non_layer_records):
        if len(record.shape) < 2:
            continue
        n_out = fewer_outputs(record.shape[-2], n_threads)
        has_experts = "_exps." in record.name
        product = Product(_TYPE_IDS[record.dtype], record.shape[-1], n_out, has_experts)
        if product not in seen:
            seen.add(product)
            yield product, record


def _attentions(model: GgufModel, type_k: str, type_v: str) -> Iterable[Attention]:
    types = (_TYPE_IDS[CACHE_TYPES[type_k]], _TYPE_IDS[CACHE_TYPES[type_v]])
    lengths = {(x.key_length, x.value_length) for x in model.kv_shape.layers}
    return [Attention(*pair, *types) for pair in sorted(lengths)]


class _Checks:
    """Cached checks of ggml on this machine."""

    def __init__(self, threads: Sequence[int]) -> None:
        self._threads = threads
        system = (load_library().llama_print_system_info() or b"").decode()
        libraries = f"llama.cpp {llama_version()} {system} {threads} threads {kernels_in_use()}"
        self._cached = CachedChecks(libraries, CANDIDATES)
        self.save = self._cached.save

    def product(self, product: Product, record: TensorRecord) -> int | None:
        def run() -> int | None:
            blocks = _file_blocks(record) if record.dtype.startswith(_SLOW_TO_MAKE) else None
            try:
                return find_min_batch_tokens(product_runs(product, self._threads, blocks))
            except ValueError:  # ggml cannot make numbers of this format
                return None

        return self._cached.find(f"product {json.dumps(astuple(product))}", run)

    def attention(self, kind: Attention) -> int | None:
        def run() -> int | None:
            try:
                return find_min_batch_tokens(attention_runs(kind, self._threads))
            except ValueError:
                return None

        return self._cached.find(f"attention {json.dumps(astuple(kind))}", run)


def _file_blocks(record: TensorRecord) -> np.ndarray:
    """Return the first blocks of a tensor, as bytes [n, bytes of a block]."""
    size = load_ggml().block_bytes(_TYPE_IDS[record.dtype])
    n_blocks = min(_MAX_FILE_BLOCKS, record.n_bytes // size)
    blocks = read_part(record.path, record.offset, n_blocks * size)
    return np.frombuffer(blocks, dtype=np.uint8).reshape(n_blocks, size)
