"""Statistics of a request, from its recorder, the backends and the operating system."""

from __future__ import annotations

from dataclasses import replace

from backends.contract.backend import TransferStats
from offload.process.memory import process_memory
from specdec.analysis.utilization import ModelFlops
from specdec.engine.sequences.request import Request
from specdec.metrics.stats import EngineStats, GenerationStats, ratio
from specdec.planning.gpu import vram_peak_bytes
from specdec.planning.run_plan import RunPlan
from specdec.run_options import CUDA


def stats_of(
    request: Request,
    plan: RunPlan,
    use: TransferStats,
    flops: ModelFlops | None,
    of_all: EngineStats,
) -> GenerationStats:
    """Return the statistics of a request so far.

    use: traffic of the target's weights since it was loaded.
    of_all: statistics of the engine.
    """
    before = request.use_before or use
    recorded = request.recorder.stats()
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


def _decoded_flops(request: Request, flops: ModelFlops, recorded: GenerationStats) -> int:
    """Return the FLOPs of all tokens but the first, which the prompt's pass computes.

    Beams count as one token per position.
    """
    num_tokens = max(recorded.generated_tokens - 1, 0)
    num_seqs = 1 if request.params.num_beams > 1 else request.params.n
    return flops.of_tokens(num_tokens, recorded.prompt_tokens + num_tokens // (2 * num_seqs))
