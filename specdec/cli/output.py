"""Output of the command line: text on stdout, everything else on stderr."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from offload.errors import SpecdecError
from offload.units import GIB


@dataclass
class Shown:
    """Choice of what goes to stderr beside notes and errors; `run_app` resets it.

    metrics: progress bars and lines of metrics. plan: the memory plan, and the libraries' logs.
    """

    metrics: bool = True
    plan: bool = False


SHOWN = Shown()
_NAME = "specdec: "


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
    print(f"{_NAME}{line}", file=stream or sys.stderr)


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


def say_parts(parts: Iterable[str]) -> None:
    """Print metrics side by side: on one line, or on as many as the terminal's width takes."""
    if SHOWN.metrics:
        width = shutil.get_terminal_size().columns if sys.stderr.isatty() else sys.maxsize
        for number, line in enumerate(_side_by_side(parts, width - len(_NAME))):
            print((" " * len(_NAME) if number else _NAME) + line, file=sys.stderr)


def _side_by_side(parts: Iterable[str], width: int) -> list[str]:
    """Return the lines; a part that is wider has one of its own."""
    lines: list[str] = []
    for part in parts:
        joined = f"{lines[-1]} | {part}" if lines else part
        if lines and len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(part)
    return lines


def perf_parts(stats: Mapping[str, Any]) -> list[str]:
    """Return speed, tokens per pass, traffic, stall share, memory; and whether it is lossy."""
    return [
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
