"""Output of the command line: text on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from offload.errors import SpecdecError
from offload.units import GIB, Progress

if TYPE_CHECKING:
    from specdec.engine.outputs import PromptProgress

_MIN_PROMPT_TOKENS = 512
"""Minimum length of a prompt whose progress is shown: shorter ones are one pass."""


@dataclass
class Shown:
    """Choice of what goes to stderr beside notes and errors; `run_app` resets it.

    metrics: progress bars and lines of metrics. plan: the memory plan, and the libraries' logs.
    """

    metrics: bool = True
    plan: bool = False


SHOWN = Shown()


class OutputError(SpecdecError):
    """stdout cannot be written to."""


def write_text(text: str) -> None:
    """Write generated text at once, so that it appears token by token."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"cannot write to stdout: {error.strerror or error}; send it to a disk with free space"
        ) from error


def write_json(value: Mapping[str, Any]) -> None:
    """Write one JSON object on one line; non-ASCII is escaped, so any terminal can show it."""
    write_text(json.dumps(value) + "\n")


def say(line: str, stream: TextIO | None = None) -> None:
    print(f"specdec: {line}", file=stream or sys.stderr)


def say_lines(lines: Iterable[str]) -> None:
    """Print lines that the user asked for in a conversation, beside its text on stdout."""
    for line in lines:
        print(line, file=sys.stderr)


def count_of(n: int, noun: str) -> str:
    """Return a number and its noun: 1 turn, 2 turns."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def say_hint(line: str) -> None:
    """Print a note that a user reads once: -q leaves it out."""
    if SHOWN.metrics:
        say(f"note: {line}")


def say_figures(line: str) -> None:
    if SHOWN.metrics:
        say(line)


@contextmanager
def loading_progress(title: str) -> Iterator[Progress]:
    """Yield a function that shows a progress bar of bytes and their speed on stderr.

    The bar appears on a terminal only, and ends before the text begins: reads during the first
    pass are not shown. It starts with the first call, so that an earlier error is not printed
    below an empty bar.
    """
    if not SHOWN.metrics or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    title_columns = (SpinnerColumn(), TextColumn("{task.description}"))
    columns = (BarColumn(), DownloadColumn(binary_units=True))
    speed = (TransferSpeedColumn(), TimeRemainingColumn())
    with _bar(*title_columns, *columns, *speed) as show:

        def update(done: int, total: int) -> None:
            # All bytes are read: measurements of the machine may follow, of unknown length.
            description = f"{title}: finishing" if done >= total else title
            show(description=description, completed=done, total=total)

        yield update


@contextmanager
def prompt_progress() -> Iterator[Callable[[PromptProgress | None], None]]:
    """Yield a function that shows a progress bar of a long prompt's tokens and the time left, on a
    terminal only; it ends before the text begins."""
    if not SHOWN.metrics or not sys.stderr.isatty():
        yield lambda _progress: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn

    left = TextColumn("tokens {task.fields[left]}")
    title = TextColumn("reading the prompt")
    with _bar(SpinnerColumn(), title, BarColumn(), MofNCompleteColumn(), left) as show:

        def update(progress: PromptProgress | None) -> None:
            if progress is None or progress.num_prompt_tokens < _MIN_PROMPT_TOKENS:
                return
            seconds = progress.seconds_left
            left = "" if seconds is None else f"{timedelta(seconds=round(seconds))} left"
            done, total = progress.num_processed, progress.num_prompt_tokens
            show(completed=done, total=total, left=left)

        yield update


@contextmanager
def _bar(*columns: Any) -> Iterator[Callable[..., None]]:
    """Yield a function that updates a transient bar on stderr, which its first call starts; calls
    after the block have no effect. Any thread may call it."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)
    lock = threading.Lock()
    is_over = False

    def show(**values: Any) -> None:
        with lock:
            if not is_over:
                bar.update(task, **values)
                bar.start()

    try:
        yield show
    finally:
        with lock:
            is_over = True
            if bar.live.is_started:
                bar.stop()


def perf_line(stats: Mapping[str, Any]) -> str:
    """Return one line: speed, tokens per pass, traffic, stall share, memory; and if it is lossy."""
    parts = [
        f"{stats['tokens_per_second']:.2f} tok/s",
        f"{stats['mean_acceptance_length']:.2f} tokens/pass",
        f"{stats['bytes_streamed'] / 1e9:.1f} GB streamed",
        *_kv_traffic(stats),
        *_copied(stats),
        *_experts(stats),
        f"stall {stall_share(stats):.0%}",
        _memory("peak", stats["peak_memory_bytes"], stats["memory_budget_bytes"]),
        *_vram(stats),
        *(() if stats["is_lossless"] else ("LOSSY (--accept-threshold)",)),
    ]
    return " | ".join(parts)


def stall_share(stats: Mapping[str, Any]) -> float:
    """Return the share of the generation, prefill included, spent waiting for storage."""
    n_decoded = max(stats["generated_tokens"] - 1, 0)
    seconds = stats["time_to_first_token"] + n_decoded * stats["time_per_output_token"]
    return min(stats["stall_seconds"] / seconds, 1.0) if seconds > 0 else 0.0


def _experts(stats: Mapping[str, Any]) -> list[str]:
    if not stats.get("experts_asked"):
        return []
    return [f"{stats['expert_hit_rate']:.0%} of experts in memory"]


def _kv_traffic(stats: Mapping[str, Any]) -> list[str]:
    n_read, n_written = stats.get("kv_bytes_read", 0), stats.get("kv_bytes_written", 0)
    if not n_read and not n_written:
        return []
    return [f"{n_read / 1e9:.1f} GB of KV read, {n_written / 1e9:.1f} written"]


def _copied(stats: Mapping[str, Any]) -> list[str]:
    n_bytes = stats.get("bytes_copied_to_device", 0)
    return [f"{n_bytes / 1e9:.1f} GB copied"] if n_bytes else []


def _vram(stats: Mapping[str, Any]) -> list[str]:
    peak_bytes = stats.get("vram_peak_bytes", 0)
    return [_memory("VRAM", peak_bytes, stats["vram_budget_bytes"])] if peak_bytes else []


def _memory(name: str, peak_bytes: int, budget_bytes: int | None) -> str:
    limit = f" of {budget_bytes / GIB:.2f}" if budget_bytes else ""
    return f"{name} {peak_bytes / GIB:.2f}{limit} GiB"
