"""Statistics of a session, from its recorders, the backends and the operating system."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from backends.contract.backend import Backend
from offload.process.disk_cache import forget_measurements
from offload.process.memory import process_memory
from specdec.analysis.utilization import ModelFlops, model_flops
from specdec.engine.engine import Engine
from specdec.engine.engine_thread import ModelClosed
from specdec.engine.sequences.request import Request
from specdec.metrics.recorder import Totals
from specdec.metrics.stats import EngineStats, GenerationStats, MeasuredPass, ratio
from specdec.planning.gpu import vram_peak_bytes
from specdec.planning.loaded import LoadedModels
from specdec.policy.cost_model import CostModel
from specdec.run_options import CUDA

_REMEASURE_RATIO = 1.5
"""Ratio of measured to planned pass times at which the machine is measured again: the cached
measurement may have been taken beside other programs."""
_ENOUGH_PASSES = 8


class SessionStatistics:
    """Statistics of the requests of an engine with loaded models, for any thread.

    It does not refer to the session, whose models are freed once nobody does.

    Args:
        totals: counters that the parts of the engine share.
    """

    def __init__(self, engine: Engine, models: LoadedModels, totals: Totals) -> None:
        self._engine, self._models, self._totals = engine, models, totals
        self._target_path = models.planned.target.source.path.absolute()
        self._model_flops: tuple[ModelFlops | None] | None = None  # not computed yet
        self._last: EngineStats | None = None
        self._lock = threading.RLock()  # held while backends are asked

    # --- of all requests -----------------------------------------------------------------------

    @property
    def of_all(self) -> EngineStats:
        """Statistics of all generations; the last ones once the models are closed."""
        with self._lock:
            return self._read() if self._last is None else self._last

    def keep_last(self) -> None:
        """Keep the present statistics, before the models are closed."""
        with self._lock:
            self._last = self._last or self._read()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Keep the present statistics while the models are closed and loaded again."""
        with self._lock:
            self._last = self._read()
        try:
            yield
        finally:
            if self._engine.is_open:
                self._last = None

    def _read(self) -> EngineStats:
        models, scheduler = self._models, self._engine.scheduler
        assert scheduler is not None, "the models are loaded"
        use, backends = models.transfer_stats, models.backends
        return replace(
            self._totals.stats(),
            bytes_streamed=use.bytes_streamed,
            kv_bytes_read=use.kv_bytes_read,
            kv_bytes_written=use.kv_bytes_written,
            bytes_copied_to_device=use.bytes_copied,
            stall_seconds=use.stall_seconds,
            sequences_running=len(scheduler.running),
            sequences_waiting=len(scheduler.waiting),
            kv_bytes=sum(backend.kv_bytes for backend in backends),
            kv_used_bytes=sum(_kv_bytes(item, item.kv_usage.n_used) for item in backends),
            kv_shared_bytes=sum(_kv_bytes(item, item.kv_usage.n_shared) for item in backends),
            state_bytes=sum(backend.state_bytes for backend in backends),
            pinned_bytes=sum(backend.pinned_bytes for backend in backends),
            memory_budget_bytes=models.plan.budget_bytes,
        )

    # --- of one request ------------------------------------------------------------------------

    def note_finished(self, request: Request) -> None:
        """Store the statistics of a request at its end, and compare its passes with the plan."""
        plan = self._models.plan
        # Nor does the plan's cost contain the reading of KV, which grows with the context.
        if not request.is_aborted and not request.is_replanned and plan.kv_split is None:
            check_pass_times(plan.cost_model, request.recorder.stats().pass_times)
        request.stats = self.of_request(request)

    def of_request(self, request: Request) -> GenerationStats:
        """Return the statistics of a request so far."""
        plan, use = self._models.plan, self._models.transfer_stats
        flops, of_all = self.model_flops, self.of_all
        before, recorded = request.use_before or use, request.recorder.stats()
        return replace(
            recorded,
            bytes_streamed=use.bytes_streamed - before.bytes_streamed,
            kv_bytes_read=use.kv_bytes_read - before.kv_bytes_read,
            kv_bytes_written=use.kv_bytes_written - before.kv_bytes_written,
            stall_seconds=use.stall_seconds - before.stall_seconds,
            bytes_copied_to_device=use.bytes_copied - before.bytes_copied,
            copy_stall_seconds=use.copy_stall_seconds - before.copy_stall_seconds,
            experts_asked=use.experts_asked - before.experts_asked,
            experts_found=use.experts_found - before.experts_found,
            vram_peak_bytes=vram_peak_bytes() if plan.device == CUDA else 0,
            vram_budget_bytes=plan.vram_budget_bytes,
            peak_memory_bytes=process_memory().peak_rss_bytes,
            memory_budget_bytes=plan.budget_bytes,
            kv_bytes=of_all.kv_bytes,
            cache_type_k=plan.cache_types[0],
            cache_type_v=plan.cache_types[1],
            pinned_bytes=of_all.pinned_bytes,
            kv_used_fraction=ratio(of_all.kv_used_bytes, of_all.kv_bytes),
            kv_shared_bytes=of_all.kv_shared_bytes,
            state_bytes=of_all.state_bytes,
            model_flops=0 if flops is None else _decoded_flops(request, flops, recorded),
            peak_flops_per_second=0.0 if flops is None else flops.peak_flops_per_second,
            is_lossless=request.spec.is_lossless,
            is_exact=plan.exactness.is_exact and request.spec.is_plain_decoding,
        )

    @property
    def model_flops(self) -> ModelFlops | None:
        """FLOPs of the target; computed at first use, so that loading does not wait for it.

        Computed between passes: transformers replaces torch's process-wide default dtype meanwhile.
        """
        if self._model_flops is None and self._engine.is_open:
            if self._engine.is_current_thread:
                self._model_flops = (self._read_flops(),)
            else:
                with suppress(ModelClosed):
                    self._engine.call(lambda: self.model_flops)
        return None if self._model_flops is None else self._model_flops[0]

    def _read_flops(self) -> ModelFlops | None:
        models = self._models
        compute = models.plan.chosen.target.compute
        return model_flops(self._target_path, models.options.backend, compute)


def check_pass_times(plan: CostModel, passes: Sequence[MeasuredPass]) -> None:
    """Let the next process measure the machine again if pass times contradict the plan."""
    # The plan assumes no opportunistic layers: a shorter pass with them is no contradiction.
    ratios = [
        max(
            one_pass.seconds / plan.planned_seconds(one_pass.num_tokens),
            1.0 if one_pass.has_pinned else 0.0,
        )
        for one_pass in passes
        if not one_pass.is_drafting_ahead
    ]
    if len(ratios) < _ENOUGH_PASSES:
        return
    if not 1 / _REMEASURE_RATIO < statistics.median(ratios) < _REMEASURE_RATIO:
        forget_measurements()


def _kv_bytes(backend: Backend, n_positions: int) -> int:
    """Return the bytes that `n_positions` token positions take in a backend's KV cache."""
    return backend.kv_bytes * n_positions // max(1, backend.n_kv_allocated)


def _decoded_flops(request: Request, flops: ModelFlops, recorded: GenerationStats) -> int:
    """Return the FLOPs of all tokens but the first, which the prompt's pass computes.

    Beams count as one token per position.
    """
    num_tokens = max(recorded.generated_tokens - 1, 0)
    num_seqs = 1 if request.params.num_beams > 1 else request.params.n
    return flops.of_tokens(num_tokens, recorded.prompt_tokens + num_tokens // (2 * num_seqs))
