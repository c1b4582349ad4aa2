"""Types of the keywords of `load` and of plans, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import TypedDict


class LoadKeywords(TypedDict, total=False):
    """Keywords of `specdec.load`: the fields of RunOptions without the models (tested)."""

    chat_template: Path | str | None
    parse_special: bool
    exact: str
    memory_budget: str | int
    device: str
    vram_budget: str | int
    ctx_size: int | None
    context_shift: bool
    parallel: int | None
    kv_tokens: int | None
    threads: int | None
    prefetch_depth: int | None
    io_threads: int | None
    load_mode: str
    cache_type_k: str | None
    cache_type_v: str | None
    prompt_cache_dir: Path | str | None
    prompt_cache_size: str | int
    spec_type: str | Sequence[str] | None
    num_draft_tokens: int | None
    tree_width: int | None
    draft_depth: int | None
    acceptance: str
    accept_threshold: float | None
    draft_ahead: str
    draft_window: int | None
    draft_device: str
    record_traces: Path | str | None
    max_traces: str | int
    num_beams: int
    beam_span: int
