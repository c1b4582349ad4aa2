"""Shared options of the commands of `specdec-bench`, and checks of them before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.errors import SpecdecError
from offload.units import UnitError, parse_bytes
from specdec.cli.options import Enforce as Enforce
from specdec.cli.options import MaxTokens as MaxTokens
from specdec.run_options import AUTO, RunOptions


class UsageMistake(SpecdecError):
    """Invalid options, or options that do not go together."""


Prompts = Annotated[
    Path,
    typer.Option(
        "--prompts",
        help="JSON lines with `prompt`, or `turns` of which the first is used.",
        show_default="16 built-in ones",
    ),
]
NPrompts = Annotated[int, typer.Option("--n-prompts", min=1, help="Use the first so many.")]
SpreadPrompts = Annotated[
    int,
    typer.Option("--n-prompts", min=1, help="Use so many, by category in turn."),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")
]
EnforceAlways = Annotated[
    bool,
    typer.Option(
        "--enforce/--no-enforce",
        help="Run every process inside a memory cgroup of the budget.",
    ),
]
StorageMbps = Annotated[
    float | None,
    typer.Option(
        "--storage-mbps",
        min=1,
        help="Limit reads to so many MB/s (blkio throttle; root).",
        show_default="as fast as the storage is",
    ),
]
Output = Annotated[
    str,
    typer.Option("-o", "--output", metavar="table|json", help="Format of stdout."),
]
OutputFile = Annotated[
    Path | None, typer.Option("--output-file", help="Also write the JSON report here.")
]
Log = Annotated[
    Path | None,
    typer.Option("--log", help="Append each record here at once, as JSON lines."),
]


def check_output(output: str) -> None:
    if output not in ("table", "json"):
        raise UsageMistake(f"-o {output!r} is not known; choose table or json")


def check_writable(option: str, path: Path | None) -> None:
    """Raise UsageMistake now, and not after an hour, if a file cannot be written."""
    if path is None:
        return
    if not path.resolve().parent.is_dir():
        raise UsageMistake(f"{option} {path}: there is no such folder; make it, or name another")
    is_new = not path.exists()
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666))
    except OSError as error:
        raise UsageMistake(
            f"{option} {path}: {error.strerror or error}; name a file that can be written"
        ) from None
    if is_new:
        path.unlink()


def parse_size(option: str, text: str) -> int:
    """Return the bytes of an option's value. Raises UsageMistake, which names the option."""
    try:
        return parse_bytes(text)
    except UnitError as error:
        raise UsageMistake(f"{option}: {error}") from error


def refuse_one_budget(load: RunOptions) -> None:
    """Raise UsageMistake for --memory-budget beside --budgets."""
    if load.memory_budget != AUTO:
        raise UsageMistake(
            f"--memory-budget {load.memory_budget} does not go with --budgets, which names the "
            "budgets to measure: leave it out"
        )


def check_lossless(load: RunOptions, command: str) -> None:
    """Raise UsageMistake for a lossy option in a comparison of lossless modes."""
    if load.accept_threshold is not None:
        raise UsageMistake(
            f"--accept-threshold is lossy, and {command} compares modes with the target's own "
            "output: leave it out, or measure it with speedup"
        )


def model_names(load: RunOptions) -> tuple[str, str | None]:
    """Return the names of the target and of its draft, as they were given."""
    return str(load.model), None if load.draft_model is None else str(load.draft_model)


def sampling_keywords(
    max_tokens: int, ignore_eos: bool, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return keywords of `LLM.generate`, with a fixed seed so that outputs can be compared."""
    return {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "seed": 0, **given}
