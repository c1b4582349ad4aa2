"""What a run is loaded with: the keywords of `specdec.load`, validated together."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backends.contract.source import CACHE_TYPES, LOAD_MODES, BackendOptions
from offload.units import parse_bytes
from specdec.checks import ConfigError
from specdec.config import SpecConfig
from specdec.models.names import SELF_DRAFT, is_self_draft
from specdec.sampling.params import MAX_BEAMS

CPU, CUDA, AUTO = "cpu", "cuda", "auto"
DEVICES = (CPU, CUDA, AUTO)
MAX_THREADS = 256
MAX_IO_THREADS = 64
MAX_PREFETCH_DEPTH = 64
DEFAULT_BEAM_SPAN = 64
"""Tokens since the last one that all beams have in common."""


@dataclass(frozen=True)
class RunOptions:
    """The models and what they may use."""

    model: str | Path
    draft_model: str | Path | None = None
    """SELF_DRAFT: the target drafts for itself, with the window of `spec`."""
    memory_budget: str | int = "auto"
    ctx_size: int | None = None
    prefetch_depth: int | None = None
    io_threads: int | None = None
    load_mode: str = "auto"
    backend: BackendOptions = BackendOptions()
    spec: SpecConfig = SpecConfig()
    prompt_cache_file: str | Path | None = None
    num_beams: int = 1
    beam_span: int = DEFAULT_BEAM_SPAN
    device: str = CPU
    """Where the target's passes are computed, from DEVICES."""
    draft_device: str = AUTO
    """Where drafting is; AUTO: wherever that should be faster."""
    vram_budget: str | int = AUTO
    """Of GPU memory, for the whole process."""
    may_leave_out_draft: bool = False
    """The plan decides whether the draft model is worth its memory: nothing about it was fixed."""

    def without_draft(self) -> RunOptions:
        """The same run where the plan leaves the draft model out."""
        others = tuple(kind for kind in self.spec.spec_type if kind != "draft")
        spec = replace(self.spec, spec_type=others, draft_window=None)
        return replace(self, draft_model=None, spec=spec)

    def target_nodes(self, n_drafted: int) -> int:
        """Live nodes that the target needs room for: a tree of n_drafted tokens, or the beams."""
        n_of_beams = self.num_beams * self.beam_span if self.num_beams > 1 else 0
        return max(1 + n_drafted, n_of_beams)

    def target_rows(self, n_drafted: int) -> int:
        """Most nodes that one pass of the target scores."""
        return max(1 + n_drafted, self.num_beams)


def run_options(
    model: str | Path,
    draft_model: str | Path | None = None,
    *,
    memory_budget: str | int = "auto",
    ctx_size: int | None = None,
    spec_type: str | Sequence[str] | None = None,
    num_draft_tokens: int | None = None,
    tree_width: int | None = None,
    draft_depth: int | None = None,
    acceptance: str = "match",
    accept_threshold: float | None = None,
    draft_ahead: str = "auto",
    threads: int | None = None,
    prefetch_depth: int | None = None,
    io_threads: int | None = None,
    load_mode: str = "auto",
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
    num_beams: int = 1,
    beam_span: int = DEFAULT_BEAM_SPAN,
    draft_window: int | None = None,
    prompt_cache_file: str | Path | None = None,
    device: str = CPU,
    draft_device: str = AUTO,
    vram_budget: str | int = AUTO,
) -> RunOptions:
    """The options that these keywords mean. Raises ConfigError for contradictions."""
    is_automatic = spec_type is None and num_draft_tokens is None and acceptance == "match"
    is_automatic = is_automatic and draft_device == AUTO
    if spec_type is None:
        spec_type = ("draft", "ngram") if draft_model is not None else ("ngram",)
    draft_model, draft_window = _split_self(draft_model, draft_window)
    if num_draft_tokens == 0:
        spec_type = ()  # no tokens from anywhere: plain decoding, and no draft to load
    spec = SpecConfig(
        spec_type,  # type: ignore[arg-type]  # a name or a list of names is normalised there
        num_draft_tokens,
        tree_width,
        draft_depth,
        acceptance,
        accept_threshold,
        draft_ahead,
        draft_window=draft_window,
    )
    if "draft" in spec.spec_type and draft_model is None:
        raise ConfigError("spec_type has 'draft' but no draft model was named: use -md")
    for name, value, most in (
        ("ctx_size", ctx_size, None),
        ("threads", threads, _most_threads()),
        ("prefetch_depth", prefetch_depth, MAX_PREFETCH_DEPTH),
        ("io_threads", io_threads, MAX_IO_THREADS),
        ("num_beams", num_beams, MAX_BEAMS),
        ("beam_span", beam_span, None),
    ):
        _check_count(name, value, most)
    if memory_budget != "auto" and parse_bytes(memory_budget) == 0:
        raise ConfigError(f"memory_budget is {memory_budget}, must be positive: try 2GiB, or auto")
    _check_devices(device, draft_device, vram_budget)
    _check_choice("load_mode", load_mode, LOAD_MODES)
    _check_choice("cache_type_k", cache_type_k, (None, *CACHE_TYPES))
    _check_choice("cache_type_v", cache_type_v, (None, *CACHE_TYPES))
    if "draft" not in spec.spec_type:
        draft_model = None  # not loaded where it would not be used
    return RunOptions(
        model=model,
        draft_model=draft_model,
        memory_budget=memory_budget,
        ctx_size=ctx_size,
        prefetch_depth=prefetch_depth,
        io_threads=io_threads,
        load_mode=load_mode,
        backend=BackendOptions(threads, cache_type_k, cache_type_v),
        spec=spec,
        num_beams=num_beams,
        beam_span=beam_span,
        prompt_cache_file=prompt_cache_file,
        # A target that drafts for itself takes next to no memory for it.
        may_leave_out_draft=is_automatic and draft_model not in (None, SELF_DRAFT),
        device=device,
        draft_device=draft_device,
        vram_budget=vram_budget,
    )


def _check_devices(device: str, draft_device: str, vram_budget: str | int) -> None:
    _check_choice("device", device, DEVICES)
    _check_choice("draft_device", draft_device, DEVICES)
    if vram_budget != AUTO and parse_bytes(vram_budget) == 0:
        raise ConfigError(f"vram_budget is {vram_budget}, must be positive: try 8GiB, or auto")


def _split_self(
    draft_model: str | Path | None, draft_window: int | None
) -> tuple[str | Path | None, int | None]:
    """(SELF_DRAFT, N) for a draft of the name self:window=N."""
    if draft_model is None or not is_self_draft(draft_model):
        return draft_model, draft_window
    found = re.fullmatch(r"self:window=([0-9]{1,9})", str(draft_model))
    if found is None:
        raise ConfigError(
            f"the draft model is {str(draft_model)!r}: the target drafts for itself with "
            "self:window=N, N being the recent tokens that it is shown, say self:window=512"
        )
    if draft_window is not None:
        raise ConfigError(f"{draft_model} names its window already: leave out draft_window")
    return SELF_DRAFT, int(found[1])


def _most_threads() -> int:
    """More are never faster, and thousands take the machine down."""
    return max(MAX_THREADS, 4 * (os.cpu_count() or 1))


def _check_count(name: str, value: int | None, most: int | None) -> None:
    if value is None:
        return
    if value < 1:
        raise ConfigError(f"{name} is {value}, must be at least 1")
    if most is not None and value > most:
        raise ConfigError(f"{name} is {value}, must be at most {most}")


def _check_choice(name: str, value: str | None, allowed: Sequence[str | None]) -> None:
    if value not in allowed:
        names = ", ".join(one for one in allowed if one is not None)
        raise ConfigError(f"{name} is {value!r}, must be one of {names}")
