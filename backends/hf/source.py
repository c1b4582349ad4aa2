"""Hugging Face checkpoints for the planner, run by the torch CPU backend."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

import torch
import transformers

from backends.attention.batch import BLOCK_SIZE
from backends.attention.blocks import REVISION
from backends.attention.stored_rows import FORMATS_REVISION, OWN_FORMATS, kv_formats
from backends.checkpoint.records import TORCH_DTYPES, BoundTensor
from backends.contract.backend import Backend
from backends.contract.cached_checks import machine
from backends.contract.curve import ComputeCurve
from backends.contract.exactness import EXACT_OFF
from backends.contract.source import (
    MAX_PROMPT_STATES,
    BackendOptions,
    KvSplit,
    Loading,
    ModelCompute,
    ModelSource,
    StoredKv,
)
from backends.feedforward.linear import library_of, slow_products
from backends.feedforward.timing import measure_compute
from backends.hf.activations import activation_bytes
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.expert_records import ExpertMatrix
from backends.hf.loading import load_hf_model
from backends.hf.model import HfModel
from backends.hf.row_tables import resident_records, row_bytes
from backends.hf.self_test import TorchExactness, find_exactness
from backends.hf.threads import keep_few_kernels, use_threads
from backends.hf.weights import TorchWeights
from backends.kv.block_file import block_bytes
from backends.kv.pool import blocks_of
from backends.kv.staging import N_BUFFERS, staging_bytes
from backends.kv.tier_sizes import Tiers
from backends.packed.codec import load_decoders
from backends.packed.timing import measure_decoding, measure_products
from backends.recurrent.memory import planned_bytes
from backends.recurrent.timing import measure_recurrences
from backends.timing.passes import is_small, measure_small
from offload.formats.fingerprint import fingerprint
from offload.formats.outline import measured_file
from offload.formats.tensors import TensorRecord
from offload.placement.placement import LayerWeights
from offload.storage.reading import resident_footprint

_ADVISED_CACHE_TYPE = "q8_0"
_NAMES = {dtype: name.lower() for name, dtype in TORCH_DTYPES.items()}
_ROW_COPIES = 4
"""Copies of the rows that a pass gathers: as read, as a tensor, for each token, and scaled."""
SchemeCurves: TypeAlias = list[tuple[float, ComputeCurve]]
"""List of (share of the stored bytes, seconds per byte of it)."""


class HfSource(ModelSource):
    """A directory with safetensors and a config.json."""

    can_use_gpu = True

    def __init__(
        self,
        directory: Path,
        options: BackendOptions,
        load: Callable[[Path], HfModel] = load_hf_model,
    ) -> None:
        """load: builds the model of a directory, without weights."""
        formats = kv_formats(options.cache_type_k, options.cache_type_v)
        keep_few_kernels()
        self._n_threads = use_threads(options.n_threads)
        self._follows_load = options.n_threads is None
        self._is_exact = options.is_exact
        self.path = directory
        self.model: HfModel = replace(load(directory), kv_formats=formats)
        self.vocab_size = self.model.vocab_size
        self.max_context = self.model.max_context
        self.experts = self.model.experts
        self.can_use_gpu = not self.experts and not self.model.recurrences
        self.warnings = self.model.weight_warnings + slow_products(self.model.dtype)

    @cached_property
    def layers(self) -> tuple[LayerWeights, ...]:  # type: ignore[override]
        return self.model.layer_weights

    @property
    def weight_file(self) -> Path:
        paths = {record.path for layer in self.layers for record in layer.tensors}
        paths |= {r.path for x in self.experts if x is not None for e in x.tensors for r in e}
        return measured_file(max(paths, key=lambda path: path.stat().st_size))

    def fingerprint(self) -> str:
        config = self.model.config.to_dict()
        for key in ("transformers_version", "_name_or_path"):  # differ between copies of a model
            config.pop(key, None)
        description = json.dumps(config, sort_keys=True, default=str)
        description += f" {self.model.dtype} {torch.__version__}"
        if self.model.kv_formats != OWN_FORMATS:
            description += f" KV {[x.name for x in self.model.kv_formats]} {FORMATS_REVISION}"
        kernels = {type(shape.recurrence).__name__ for shape in self.model.recurrences.values()}
        description += "".join(f" {name}" for name in sorted(kernels))  # of states, in own layouts
        if self.exactness.is_exact:
            description += f" exact {REVISION} {machine(self._libraries)}"
        layers = [record for layer in self.layers for record in layer.tensors]
        experts = [expert[0] for x in self.experts if x is not None for expert in x.tensors]
        return fingerprint((*self.model.non_layer_records, *layers, *experts), description)

    @property
    def non_layer_bytes(self) -> int:
        model = self.model
        copies = model.converted_bytes + self._decode_buffer_bytes
        return resident_footprint(self._resident_records) + copies

    def load_decoders(self) -> None:
        packed = self.model.packed_modules
        load_decoders({module.tensors[0].record.scheme for module in packed})

    @property
    def _decode_buffer_bytes(self) -> int:
        """Bytes for decoding on the CPU."""
        self.load_decoders()
        return self.model.decode_buffer_bytes(self._n_threads)

    @property
    def _resident_records(self) -> Sequence[TensorRecord]:
        return resident_records(self.model)

    @property
    def cache_types(self) -> tuple[str, str]:  # type: ignore[override]
        own = _NAMES[self.model.dtype]
        keys, values = self.model.kv_formats
        return keys.name or own, values.name or own

    @property
    def smaller_cache_types(self) -> tuple[str, ...]:  # type: ignore[override]
        smaller = self.with_cache_type(_ADVISED_CACHE_TYPE).model.kv_bytes_per_token
        return (_ADVISED_CACHE_TYPE,) if smaller < self.model.kv_bytes_per_token else ()

    def with_cache_type(self, cache_type: str) -> HfSource:
        other = copy.copy(self)
        other.model = replace(self.model, kv_formats=kv_formats(cache_type, cache_type))
        return other

    def kv_bytes(self, ctx_size: int, max_nodes: int) -> int:
        num_tokens = ctx_size + max_nodes + self.exactness.min_batch_tokens
        return blocks_of(num_tokens) * BLOCK_SIZE * self.model.kv_bytes_per_token

    @property
    def can_store_kv(self) -> bool:  # type: ignore[override]
        """Layers that attend to another layer's KV would need it longer than it is staged."""
        with_kv = [bool(n) for n in self.model.layer_kv_values]
        attends = [self.model.has_attention(i) for i in range(len(with_kv))]
        return sum(with_kv) > N_BUFFERS and with_kv == attends

    def min_hot_tokens(self, max_nodes: int) -> int:
        return Tiers.min_hot_tokens(max_nodes + self.exactness.min_batch_tokens)

    def stored_kv(
        self, sizes: tuple[int, int], split: KvSplit, max_num_tokens: int, max_nodes: int
    ) -> StoredKv:
        model, n_more = self.model, self.exactness.min_batch_tokens
        ctx_size, kv_tokens = sizes
        token_bytes = tuple(map(sum, model.stored_kv_bytes))
        tiers = Tiers.of(split.hot_tokens, max_nodes + n_more, Path())
        n_cold = tiers.n_cold(blocks_of(kv_tokens + max_nodes + n_more))
        num_tokens = max(max_num_tokens, n_more)
        scratch = activation_bytes(
            model, ctx_size + num_tokens, num_tokens, prompt_tokens=split.prompt_tokens
        )
        return StoredKv(
            tiers.n_hot * BLOCK_SIZE * model.kv_bytes_per_token,
            staging_bytes(n_cold, block_bytes(max(token_bytes))),
            _ROW_COPIES * num_tokens * row_bytes(model) + scratch,
            token_bytes,
            split,
        )

    def _tiers(self, loading: Loading) -> Tiers | None:
        split = loading.kv_split
        if split is None:
            return None
        assert loading.kv_folder is not None, "a split KV cache has a folder"
        n_nodes = loading.max_nodes + self.exactness.min_batch_tokens
        return Tiers.of(split.hot_tokens, n_nodes, loading.kv_folder)

    def state_bytes(self, n_sequences: int, max_nodes: int) -> int:
        model = self.model
        return planned_bytes(
            n_sequences,
            max_nodes,
            model.state_bytes,
            model.fed_bytes_per_token,
            model.largest_state_bytes,
        )

    def scratch_bytes(self, ctx_size: int, max_num_tokens: int, max_nodes: int) -> int:
        num_tokens = max(max_num_tokens, self.exactness.min_batch_tokens)
        rows = _ROW_COPIES * num_tokens * row_bytes(self.model)
        limit = MAX_PROMPT_STATES if self.hidden_state_bytes else None
        return rows + activation_bytes(self.model, ctx_size, num_tokens, prompt_tokens=limit)

    def shared_scratch_bytes(
        self, ctx_size: int, kv_tokens: int, max_num_tokens: int, max_nodes: int
    ) -> int:
        """See ModelSource; attention in blocks reads each sequence's keys where they are."""
        if self.model.takes_whole_cache:
            kv_tokens = min(kv_tokens, ctx_size + max_num_tokens)
        return self.scratch_bytes(kv_tokens, max_num_tokens, max_nodes)

    @property
    def head_bytes(self) -> int:
        model = self.model
        return int(model.vocab_size * model.config.hidden_size * model.dtype.itemsize)

    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        if is_small(self) and not self.hidden_state_bytes:  # a head runs with its target alone
            return measure_small(self, f"{self._libraries} {self.model.dtype}")
        reading = self.weight_file if beside_reads else None
        curve = measure_compute(self.model.dtype, reading)
        curve = curve.padded_to(self.exactness.min_batch_tokens)
        measure = partial(measure_products, n_threads=self._n_threads, reading=reading)
        packed = self._by_scheme(measure)
        return self._compute(curve, packed, self.measure_states(reading), is_fused=True)

    def measure_states(self, reading: Path | None = None) -> ComputeCurve | None:
        recurrences = self.model.recurrences.values()
        return measure_recurrences(recurrences, reading) if recurrences else None

    def _compute(
        self,
        curve: ComputeCurve,
        packed: SchemeCurves,
        states: ComputeCurve | None,
        *,
        is_fused: bool = False,
    ) -> ModelCompute:
        """Return the seconds of passes.

        curve: seconds per byte of products with weights stored plain.
        packed: of packed weights: of decoding alone, or if `is_fused` with their products.
        states: seconds of all recurrent layers beside their products.
        """
        if not packed and states is None:
            return ModelCompute(curve, self.head_bytes)
        tensors = self._all_tensors
        n_bytes = sum(tensor.record.n_bytes for tensor in tensors)
        plain = [tensor for tensor in tensors if not (is_fused and tensor.record.scheme)]
        growth = sum(tensor.computed_bytes for tensor in plain) / n_bytes
        n_layer_bytes = sum(layer.n_bytes for layer in self.layers)
        of_states = [] if states is None else [(1 / n_layer_bytes, states)]
        per_byte = ComputeCurve.mixed([(growth, curve), *packed, *of_states])
        return ModelCompute(per_byte, self.head_bytes, head_per_byte=curve)

    @property
    def multiplied(self) -> tuple[TensorRecord, ...]:
        return tuple(replace(x.record, n_bytes=x.computed_bytes) for x in self._all_tensors)

    @property
    def _all_tensors(self) -> list[BoundTensor | ExpertMatrix]:
        """Tensors of the layers, those of experts included."""
        model = self.model
        experts = [x for own in model.expert_matrices if own for e in own for x in e]
        return [*(bound for layer in model.layer_tensors for bound in layer), *experts]

    def decode_seconds(self) -> float:
        n_bytes = sum(layer.n_bytes for layer in self.layers)
        decoding = self._by_scheme(partial(measure_decoding, n_threads=self._n_threads))
        return sum(n_bytes * share * curve.seconds(1) for share, curve in decoding)

    def _by_scheme(self, measure: Callable[[str], ComputeCurve]) -> SchemeCurves:
        """Return (share of all tensors' bytes, its curve) for each packing scheme."""
        n_bytes: Counter[str] = Counter()
        for tensor in self._all_tensors:
            n_bytes[tensor.record.scheme] += tensor.record.n_bytes
        total = n_bytes.total()
        return [(n / total, measure(scheme)) for scheme, n in sorted(n_bytes.items()) if scheme]

    @property
    def _libraries(self) -> str:
        versions = f"torch {torch.__version__} transformers {transformers.__version__}"
        products = library_of(self.model.dtype)
        return f"{versions} {products} {self._n_threads} threads"

    @cached_property
    def exactness(self) -> TorchExactness:
        if not self._is_exact:
            return TorchExactness(**asdict(EXACT_OFF))
        return find_exactness(self.model, self._n_threads)

    def check_unchanged(self) -> None:
        self.model.index.check_unchanged()

    def _weights(self, loading: Loading) -> TorchWeights:
        """Load the weights of a plan."""
        placement = loading.placement
        return CpuWeights(
            self.model,
            placement.layers,
            placement.n_slots,
            n_readers=loading.n_readers,
            progress=loading.progress,
            experts=placement.experts,
        )

    def _load(self, loading: Loading) -> Backend:
        return TorchBackend(
            self.model,
            self._weights(loading),
            max_context=loading.max_context,
            max_nodes=loading.max_nodes,
            num_kv_slots=loading.num_kv_slots,
            exactness=self.exactness,
            n_threads=self._n_threads,
            follows_load=self._follows_load and self.exactness.can_change_threads(),
            tiers=self._tiers(loading),
        )
