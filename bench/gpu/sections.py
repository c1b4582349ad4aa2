"""Sections of the measurements on a GPU, one function each, which `bench.gpu.suite` runs.

Each gets a `note` that saves results so far, should the section be cut short.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bench.decode.known_drafter import KnownAccuracyDrafter, expected_tokens
from bench.gpu.equality import drift, fp32, smallest_budget
from bench.gpu.machine import machine, vram_outside_torch
from bench.gpu.settings import Note, Settings
from bench.process.child import forget_model
from bench.process.provenance import versions
from bench.prompts.workloads import BUILT_IN, Prompt, read_prompts
from specdec.api import LLM, load
from specdec.config import SpecConfig
from specdec.metrics.stats import GenerationStats, ratio
from specdec.run_options import AUTO, CUDA

SMALLEST = "smallest"
_MORE_LAYERS = 4
"""Layers of the small targets, in multiples of the source's: the smallest budgets hold a few."""


def grow_targets(s: Settings, note: Note) -> None:
    """Grow the large target, and two small ones: the source with more layers, enough to move."""
    from bench.synth.checkpoint import grow
    from bench.synth.shapes import named_shape
    from bench.synth.source import SourceModel
    from specdec.models.names import resolve_model

    source = resolve_model(s.source)
    own = SourceModel(source).shape
    small = replace(own, n_layers=_MORE_LAYERS * own.n_layers)
    targets = (
        (s.small_target, small, "bf16"),
        (s.exact_target, small, "fp32"),
        (s.target, small if s.shape is None else named_shape(s.shape), "bf16"),
    )
    for out, shape, dtype in targets:
        started = time.perf_counter()
        grown = grow(source, out, shape, dtype=dtype, force=True, source_name=s.source)
        results = {"n_bytes": grown.n_bytes, "n_layers": grown.shape.n_layers, "from": s.source}
        note(out.name, {**results, "seconds": time.perf_counter() - started})


# --- decoding -------------------------------------------------------------------------------------


def decode(s: Settings, note: Note) -> None:
    """Measure plain and speculative decoding, and the curve, with sufficient host memory."""
    with _loaded(s, s.host_budget, note) as llm:
        prompts = read_prompts(BUILT_IN, 1)
        plain, known = _decode_modes(llm, s, prompts[0], note)
        sampled = _timed(llm, s, prompts[0], s.speculative_tokens, temperature=0.7, seed=0)
        note("speculative, T = 0.7", _values(sampled[0]))
        _curve(llm, s, prompts[0], (plain, known), note)


def three_tiers(s: Settings, note: Note) -> None:
    """Measure decoding with too little host memory, so that every pass reads storage."""
    with _loaded(s, s.small_host_budget, note) as llm:
        _decode_modes(llm, s, read_prompts(BUILT_IN, 1)[0], note)


def _loaded(s: Settings, host_budget: str, note: Note) -> LLM:
    options: dict[str, Any] = {"device": s.device, "ctx_size": s.ctx_size}
    for name, budget in (("vram_budget", s.vram_budget), ("memory_budget", host_budget)):
        is_least = budget == SMALLEST
        options[name] = smallest_budget(name, s.target, s.draft, options) if is_least else budget
    forget_model(s.target)
    started = time.perf_counter()
    llm = load(s.target, s.draft, **options)
    note("load_seconds", time.perf_counter() - started)
    note("plan", llm.plan.to_dict())
    return llm


def _decode_modes(
    llm: LLM, s: Settings, prompt: Prompt, note: Note
) -> tuple[GenerationStats, tuple[int, ...]]:
    """Return statistics of plain decoding, and the greedy token ids."""
    llm.generate(prompt.text, max_tokens=2)  # warms up
    plain, _ = _timed(llm, s, prompt, s.plain_tokens, speculative=False)
    note("plain", _values(plain))
    note("pass", _pass_against_bounds(llm, plain))
    drafted, text = _timed(llm, s, prompt, s.speculative_tokens)
    note("speculative", _values(drafted))
    note("speculative_versus_plain", ratio(drafted.tokens_per_second, plain.tokens_per_second))
    if s.device == CUDA:
        note("vram_outside_torch_bytes", vram_outside_torch())
    return plain, text


def _timed(
    llm: LLM, s: Settings, prompt: Prompt, n_tokens: int, **how: Any
) -> tuple[GenerationStats, tuple[int, ...]]:
    """Return statistics and token ids of one generation, cut short if it takes too long."""
    started = time.perf_counter()
    stream = llm.stream(
        prompt.text, cache_prompt=False, ignore_eos=True, max_tokens=n_tokens, **how
    )
    for _ in stream:
        if time.perf_counter() - started > s.seconds_per_run:
            stream.cancel()
    return stream.result.stats, tuple(stream.result.token_ids)


def _values(stats: GenerationStats) -> dict[str, Any]:
    seconds_per_pass = ratio(stats.decode_seconds, stats.passes)
    return {**stats.to_dict(), "seconds_per_pass": seconds_per_pass}


def _pass_against_bounds(llm: LLM, plain: GenerationStats) -> dict[str, float]:
    """Return the seconds of a plain pass, and of its copies and its reads alone."""
    plan = llm.plan
    copied = plan.placement.moved_bytes if plan.device == CUDA else 0
    copies = ratio(copied, plan.chosen.target.copy_bytes_per_second)
    reads = ratio(plan.placement.streamed_bytes, plan.storage_bytes_per_second)
    measured = ratio(plain.decode_seconds, plain.passes)
    return {
        "seconds": measured,
        "copied_bytes": copied,
        "copy_seconds": copies,
        "read_seconds": reads,
        "versus_copies": ratio(measured, copies),
        "versus_the_slower": ratio(measured, max(copies, reads)),
    }


def _curve(
    llm: LLM,
    s: Settings,
    prompt: Prompt,
    decoded: tuple[GenerationStats, tuple[int, ...]],
    note: Note,
) -> None:
    """Measure speed with drafts that are right with a given probability.

    decoded: statistics of plain decoding, and the output that the drafter knows.
    """
    plain, known = decoded
    n_chain = min(s.chain_tokens, llm.plan.n_draft_tokens)
    spec = SpecConfig(("ngram",), n_chain, 1, n_chain, draft_ahead="off")
    script = [*llm.tokenizer.encode(prompt.text), *known]
    points = []
    for rate in s.rates:
        n_tokens = 1 + round(s.n_curve_passes * expected_tokens(rate, n_chain))
        drafter = KnownAccuracyDrafter(script, rate, llm.tokenizer.n_tokens, (round(1e6 * rate),))
        stats, _ = _timed(llm, s, prompt, min(n_tokens, len(known)), spec=spec, drafter=drafter)
        points.append(
            {
                "rate": rate,
                "tokens_per_pass": stats.mean_acceptance_length,
                "tokens_per_second": stats.tokens_per_second,
                "versus_plain": ratio(stats.tokens_per_second, plain.tokens_per_second),
            }
        )
        note("curve", {"chain_tokens": n_chain, "points": points})


# --- another program ------------------------------------------------------------------------------


def peer(s: Settings, note: Note) -> None:
    """Measure transformers + accelerate with the same checkpoint and limits for weights."""
    if "accelerate" not in versions():
        note("skipped", "accelerate is not installed")
        return
    from transformers import AutoTokenizer

    from bench.peers.accelerate import Decoder, count_modules, load_offloaded
    from bench.peers.program import Clock
    from offload.units import parse_bytes

    tokenizer = AutoTokenizer.from_pretrained(s.target, local_files_only=True)
    host = 2**40 if s.host_budget == AUTO else parse_bytes(s.host_budget)
    vram = parse_bytes(s.vram_budget) if s.device == CUDA and s.vram_budget != SMALLEST else None
    forget_model(s.target)
    with tempfile.TemporaryDirectory(prefix="specdec-peer-") as folder:
        model = load_offloaded(s.target, host, folder, vram)
        places: dict[str, str | int] = {"gpu": 0, "cpu": "cpu", "disk": "disk"}
        note("modules", {name: count_modules(model, place) for name, place in places.items()})
        decoder = Decoder(model, tokenizer, None, s.peer_tokens)
        clock = Clock(s.peer_tokens, s.seconds_per_run, min_count=2)
        decoder.run(read_prompts(BUILT_IN, 1)[0], clock)
    (first, _), *_, (last, _) = arrivals = clock.record()["arrivals"]
    note("tokens_per_second", ratio(len(arrivals) - 1, last - first))
    if vram is not None:
        import torch

        note("vram_peak_bytes", torch.cuda.max_memory_reserved())


FUNCTIONS: Mapping[str, Callable[[Settings, Note], None]] = {
    "machine": machine,
    "grow": grow_targets,
    "decode": decode,
    "three tiers": three_tiers,
    "peer": peer,
    "drift": drift,
    "fp32": fp32,
}
