"""GgufSource: a GGUF model for the planner, run by llama.cpp."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from backends.contract.backend import Backend
from backends.contract.cached_checks import machine
from backends.contract.curve import ComputeCurve
from backends.contract.exactness import EXACT_OFF, Exactness
from backends.contract.source import CACHE_TYPES, BackendOptions, Loading, ModelCompute, ModelSource
from backends.ggml.library import LlamaModel, llama_version
from backends.ggml.tiles import kernels_in_use, leave_out_tiles
from backends.ggml.timing import measure_ggml_compute
from backends.gguf.exactness import ExactRun, find_exact_run
from backends.gguf.heads import can_run_head
from backends.gguf.hparams import refuse_cache_type
from backends.gguf.model import GgufModel, load_gguf_model
from backends.gguf.recurrent import refuse_untried
from backends.gguf.timed_sample import can_be_sampled, sample_file, spread_layers
from backends.llama.backend import LlamaBackend
from backends.llama.context import (
    MAX_LEAVES,
    ContextOptions,
    LlamaContext,
    WithoutFlashAttention,
)
from backends.llama.loading import cells_with_short_factors
from backends.llama.memory import bytes_of_a_state, context_memory
from backends.llama.recurrent_backend import RecurrentLlamaBackend
from backends.llama.trial import TextLimits, TrialResult, try_model
from backends.timing.cached import cached_curve
from backends.timing.measure import WEIGHT_BYTES, matrix_formats
from backends.timing.passes import is_small, measure_passes, measure_small
from offload.errors import SpecdecError
from offload.formats.fingerprint import fingerprint
from offload.formats.gguf_header import GGML_TYPES
from offload.formats.outline import measured_file
from offload.formats.tensors import TensorRecord
from offload.paging.expert_pages import outside, overhead_bytes
from offload.paging.memory import move_seconds_per_byte
from offload.paging.plan import paging_overhead_bytes, paging_slot_bytes
from offload.placement.placement import Placement
from offload.process.cpus import usable_cpus
from offload.process.memory import memory_limit, reset_peak_rss
from offload.storage.reading import resident_footprint

logger = logging.getLogger(__name__)

DEFAULT_CACHE_TYPE = CACHE_TYPES[0]
_QUANTISED_CACHE_TYPES = ("q8_0", "q4_0")
_TYPE_IDS = {kind.name: number for number, kind in GGML_TYPES.items()}
_SAMPLE_ROWS = (1, 4, 8, 16, 32)
"""Tokens of timed passes: a root and a tree of 2**k - 1 nodes, as plans have them, since the time
of ggml's products steps up after each power of two."""
_SAMPLE_SHARE = 8
"""Divisor of the memory limit: timing layers takes at most that part of it."""


class GgufSource(ModelSource):
    """A GGUF model: one file, or the first one of a split model."""

    can_mmap = True
    max_tree_leaves = MAX_LEAVES

    def __init__(self, path: Path, options: BackendOptions, run: ExactRun | None = None) -> None:
        """run: how to run the model, if that was found out before; skips the trial of the model."""
        refuse_cache_type(options.cache_type_k, options.cache_type_v)
        self.path = path
        self.model: GgufModel = load_gguf_model(path)
        refuse_untried(self.model)
        is_known = run is not None
        self.trial = TrialResult(TextLimits(None)) if is_known else try_model(self.model)
        self.vocab_size = self.model.vocab_size
        self.max_context = self.model.max_context
        self.experts = self.model.experts
        self.layers = self.model.layers_without_experts if self.experts else self.model.layers
        self.prefers_chains = self.model.is_recurrent
        self._options = options
        self._n_threads = options.n_threads or usable_cpus()
        self._known_run = run
        if options.is_exact and self.model.n_experts:
            leave_out_tiles()  # before anything is measured
        self._scratch_bytes: dict[ContextOptions, int] = {}
        if self.model.n_experts and not self.experts:
            self.warnings = (
                f"a mixture of {self.model.n_experts} experts: every pass reads all of them, "
                "although a token uses few",
            )

    @cached_property
    def _run(self) -> ExactRun:
        if self._known_run is not None:
            return self._known_run
        types = (self._options.cache_type_k, self._options.cache_type_v)
        if self._options.is_exact:
            run = find_exact_run(self.model, self._n_threads, *types)
            return self._checked(run) if run.exactness.is_exact else run
        type_k, type_v = (name or DEFAULT_CACHE_TYPE for name in types)
        return ExactRun(EXACT_OFF, type_k, type_v)

    def _checked(self, run: ExactRun) -> ExactRun:
        """Return `run`, marked as not exact if llama.cpp does not use flash attention after all."""
        options = ContextOptions(
            1,
            1,
            1,
            self._n_threads,
            run.type_k,
            run.type_v,
            exactness=run.exactness,
        )
        try:
            LlamaContext(self.weightless, options).close()
        except WithoutFlashAttention as error:
            return replace(run, exactness=Exactness(False, str(error)))
        return run

    @property
    def exactness(self) -> Exactness:
        return self._run.exactness

    @property
    def weight_file(self) -> Path:
        return measured_file(max(self.model.index.paths, key=lambda path: path.stat().st_size))

    def fingerprint(self) -> str:
        metadata = self.model.index.metadata
        single = [key for key in sorted(metadata) if metadata.array_length(key) is None]
        description = {key: metadata[key] for key in single}  # arrays are the tokenizer
        exact = f"exact {machine(self._libraries)} " if self.exactness.is_exact else ""
        formats = (self._run.type_k, self._run.type_v, f"{exact}{llama_version()}")
        return fingerprint(self.model.index.values(), f"{description} {formats}")

    @property
    def non_layer_bytes(self) -> int:
        return resident_footprint(self.model.resident_non_layer_records)

    @property
    def cache_types(self) -> tuple[str, str]:  # type: ignore[override]
        return self._run.type_k, self._run.type_v

    @property
    def smaller_cache_types(self) -> tuple[str, ...]:  # type: ignore[override]
        present = (self._run.type_k, self._run.type_v)
        if not set(present) <= set(_QUANTISED_CACHE_TYPES):
            return _QUANTISED_CACHE_TYPES
        return _QUANTISED_CACHE_TYPES[1 + max(map(_QUANTISED_CACHE_TYPES.index, present)) :]

    def streaming_overhead_bytes(self, n_slots: int) -> int:
        n_bytes = paging_overhead_bytes(self.layers, n_slots, self._not_paged)
        return n_bytes + overhead_bytes(self.experts)

    def slot_bytes(self, placement: Placement) -> int:
        return paging_slot_bytes(placement.layers, self._not_paged)

    @property
    def _not_paged(self) -> tuple[TensorRecord, ...]:
        beside = outside(self.experts)
        own = (*self.model.non_layer_records, *self.model.mtp_records)
        return (*own, *beside.resident, *beside.untouched)

    def kv_bytes(self, ctx_size: int, max_nodes: int) -> int:
        types = self._run.type_k, self._run.type_v
        n_cells = ContextOptions(ctx_size, max_nodes, exactness=self.exactness).n_cells
        return n_cells * self.model.kv_bytes_per_token(*types, flash_attention=True)

    def state_bytes(self, n_sequences: int, max_nodes: int) -> int:
        if not self.model.is_recurrent:
            return 0
        options = ContextOptions(1, 1, max_num_seqs=2 * n_sequences, is_recurrent=True)
        return options.n_sequences * self._bytes_of_a_state

    def state_input_bytes(self, max_nodes: int) -> int:
        options = ContextOptions(1, max_nodes, exactness=self.exactness)
        return self.model.state_input_bytes(options.max_rollback_tokens)

    @cached_property
    def _bytes_of_a_state(self) -> int:
        return bytes_of_a_state(self.weightless)

    def with_cache_type(self, cache_type: str) -> GgufSource:
        other = copy.copy(self)
        other._options = replace(self._options, cache_type_k=cache_type, cache_type_v=cache_type)
        other._known_run = None
        other.__dict__.pop("_run", None)
        return other

    @cached_property
    def weightless(self) -> LlamaModel:
        """The model without weights, to ask for the memory of contexts until the model is loaded;
        cached because reading the vocabulary takes up to a second."""
        loaded = LlamaModel(self.path, "none", has_head=can_run_head(self.model))
        weakref.finalize(self, loaded.close)
        return loaded

    @property
    def planning_takes_memory(self) -> bool:
        """See ModelSource: that of `weightless`."""
        return True

    def end_planning(self) -> None:
        """See ModelSource."""
        if "weightless" in self.__dict__:
            self.__dict__.pop("weightless").close()

    def scratch_bytes(self, ctx_size: int, max_num_tokens: int, max_nodes: int) -> int:
        options = ContextOptions(
            ctx_size,
            max_nodes,
            max_num_tokens,
            self._n_threads,
            self._run.type_k,
            self._run.type_v,
            exactness=self.exactness,
            is_recurrent=self.model.is_recurrent,
        )
        if options not in self._scratch_bytes:
            memory = context_memory(self.model, self.weightless, options)
            self._scratch_bytes[options] = memory.scratch_bytes
        return self._scratch_bytes[options]

    def can_share_kv(self, ctx_size: int, kv_tokens: int, max_nodes: int) -> bool:
        """See ModelSource and `cells_with_short_factors`."""
        options = ContextOptions(
            ctx_size, max_nodes, exactness=self.exactness, num_kv_slots=kv_tokens
        )
        n_short = cells_with_short_factors(self.model, options)
        return n_short is None or options.n_cells <= n_short

    @property
    def head_bytes(self) -> int:
        return sum(record.n_bytes for record in self.model.resident_non_layer_records)

    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        if is_small(self):
            return measure_small(self, self._libraries)
        reading = self.weight_file if beside_reads else None
        per_byte = self._measure_layers(reading)
        head = self._measure_padded(self.model.resident_non_layer_records, None)
        moving = move_seconds_per_byte() if beside_reads else 0.0
        return ModelCompute(per_byte, self.head_bytes, moving, head)

    def _measure_layers(self, reading: Path | None) -> ComputeCurve:
        """Return seconds per byte, timed on a few layers run by llama.cpp, or on single products if
        a few layers are too large or do not stand for all."""
        chosen = spread_layers(self.model, WEIGHT_BYTES)
        n_bytes = sum(r.n_bytes for i in chosen for r in self.layers[i].tensors)
        is_small_enough = n_bytes <= memory_limit().n_bytes // _SAMPLE_SHARE
        if is_small_enough and can_be_sampled(self.model):
            try:
                return self._measure_sample(chosen, reading)
            except (SpecdecError, OSError, ValueError, KeyError) as error:  # of gguf and memfd
                logger.warning("passes are predicted from single products: %s", error)
        records = [record for layer in self.model.layers for record in layer.tensors]
        return self._measure_padded(records, reading)

    def _measure_sample(self, layers: tuple[int, ...], reading: Path | None) -> ComputeCurve:
        run = self._run

        def measure() -> ComputeCurve:
            with sample_file(self.model, layers) as path:
                sample = GgufSource(path, self._options, run)
                return measure_passes(sample, _SAMPLE_ROWS, reading=reading, load_mode="mmap")

        shapes = [(r.dtype, r.shape) for i in layers for r in self.layers[i].tensors]
        kind = f"{self.model.architecture} {shapes} {run.type_k} {run.type_v} {_SAMPLE_ROWS}"
        rows = run.exactness.min_batch_tokens
        return cached_curve(f"{self._libraries} {kind} {rows}", measure, reading)

    @property
    def _libraries(self) -> str:
        return f"llama.cpp {llama_version()} {self._n_threads} threads {kernels_in_use()}"

    def _measure_padded(
        self, records: Sequence[TensorRecord], reading: Path | None
    ) -> ComputeCurve:
        curve = measure_formats(records, self._n_threads, reading)
        return curve.padded_to(self.exactness.min_batch_tokens)

    def check_unchanged(self) -> None:
        self.model.index.check_unchanged()

    def _load(self, loading: Loading) -> Backend:
        self.end_planning()
        backend = (RecurrentLlamaBackend if self.model.is_recurrent else LlamaBackend)(
            self.model,
            max_context=loading.max_context,
            max_nodes=loading.max_nodes,
            num_kv_slots=loading.kv_tokens if loading.has_more_tokens else None,
            max_num_seqs=loading.max_num_seqs,
            max_outputs=loading.max_num_tokens,
            n_threads=self._n_threads,
            follows_load=self._options.n_threads is None and self.exactness.can_change_threads(),
            cache_type_k=self._run.type_k,
            cache_type_v=self._run.type_v,
            placement=loading.placement,
            load_mode=loading.load_mode,
            n_readers=loading.n_readers,
            progress=loading.progress,
            exactness=self.exactness,
            has_head=loading.has_head,
            hidden_state_layers=loading.hidden_state_layers,
        )
        if loading.load_mode == "stream":
            reset_peak_rss()  # llama.cpp may have read the whole file: see unread.py
        return backend


def measure_formats(
    records: Sequence[TensorRecord], n_threads: int, reading: Path | None
) -> ComputeCurve:
    """Return the mean seconds per byte of these weights over their number formats."""
    n_bytes = {
        name: sum(record.n_bytes for record in records if record.dtype == name)
        for name in matrix_formats(records)
    }
    total = sum(n_bytes.values())
    return ComputeCurve.mixed(
        [
            (n / total, measure_ggml_compute(_TYPE_IDS[name], n_threads, reading))
            for name, n in n_bytes.items()
        ]
    )
