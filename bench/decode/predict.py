"""Does the plan's prediction hold? Predicted against measured, over models, budgets and storages.

Every setting is a fresh process inside a memory cgroup of its budget; slower storage is a limit on
reading that the kernel enforces (`offload.storage.read_limit`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.decode.prediction_run import PredictionSpec
from bench.options import OutputFile, check_writable
from bench.process.child import forget_model, quiet_libraries, result_of_child
from bench.process.provenance import collect
from bench.process.results import write_json
from bench.prompts.workloads import BUILT_IN, read_prompts
from offload.errors import SpecdecError
from offload.storage.read_limit import ReadLimit
from offload.units import parse_bytes
from specdec.models.files import largest_weight_file
from specdec.models.names import resolve_draft, resolve_model
from specdec.models.opened import is_gguf

UNLIMITED = "unlimited"
KINDS = ("plain", "speculative")


class PredictionError(SpecdecError, ValueError):
    """An option makes no sense."""


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    model: Path
    draft_model: str
    memory_budget: str
    storage_mbps: int | None
    """10^6 bytes per second; None: as fast as it is."""


def predict_command(
    context: typer.Context,
    model: Annotated[list[str], typer.Option("-m", "--model", help="Target; may be repeated.")],
    budgets: Annotated[
        str, typer.Option("--budgets", metavar="SIZE,SIZE,...", help="Memory budgets.")
    ],
    storage_mbps: Annotated[
        str,
        typer.Option(
            "--storage-mbps",
            metavar="N,N,...",
            help="Storage speeds in MB/s, set by a cgroup (root); unlimited leaves it alone.",
        ),
    ] = UNLIMITED,
    draft_model: Annotated[
        str | None,
        typer.Option(
            "-md", "--draft-model", show_default="pair:draft, in the target's format", help="Draft."
        ),
    ] = None,
    num_draft_tokens: Annotated[
        int, typer.Option("--num-draft-tokens", min=1, help="Draft tokens of a pass.")
    ] = 16,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size", min=64, help="Context.")] = 1024,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Passes of each kind.")] = 6,
    output_file: OutputFile = None,
) -> None:
    """Predicted against measured seconds per pass and tokens/s, in enforced processes."""
    quiet_libraries()
    check_writable("--output-file", output_file)
    sizes = budgets.split(",")
    for size in sizes:
        parse_bytes(size)
    settings = list(make_settings(model, draft_model, sizes, parse_speeds(storage_mbps)))
    load = {"num_draft_tokens": num_draft_tokens, "ctx_size": ctx_size}
    provenance = collect(["specdec-bench", "predict", *context.obj.argv], settings[0].model)
    rows: list[dict[str, Any]] = []
    for number, setting in enumerate(settings, 1):
        typer.echo(f"{number}/{len(settings)} {_name(setting)}", err=True)
        rows.append(run_setting(setting, load, rounds))
        if output_file is not None:  # at once: an interrupted run keeps what it has
            report = {"settings": rows, "largest_error": largest_error(rows)}
            write_json({**report, "provenance": provenance}, output_file)
    typer.echo(format_rows(rows))


def parse_speeds(text: str) -> list[int | None]:
    """ "800,unlimited" -> [800, None]. Raises PredictionError."""
    speeds: list[int | None] = []
    for word in text.split(","):
        if word != UNLIMITED and not (word.isascii() and word.isdigit() and int(word) > 0):
            raise PredictionError(
                f"--storage-mbps has {word!r}, must be MB/s such as 500, or {UNLIMITED}"
            )
        speeds.append(None if word == UNLIMITED else int(word))
    return speeds


def make_settings(
    models: Sequence[str],
    draft_model: str | None,
    budgets: Sequence[str],
    speeds: Sequence[int | None],
) -> Iterator[Setting]:
    """All combinations."""
    for name in models:
        path = resolve_model(name)
        draft = draft_model or ("pair:draft.gguf" if is_gguf(path) else "pair:draft")
        for budget in budgets:
            for speed in speeds:
                yield Setting(path, draft, budget, speed)


def run_setting(setting: Setting, load: Mapping[str, Any], n_rounds: int) -> dict[str, Any]:
    """Predict and measure in a process of its own."""
    keywords = {
        **load,
        "model": str(setting.model),
        "draft_model": setting.draft_model,
        "memory_budget": setting.memory_budget,
    }
    spec = PredictionSpec(keywords, read_prompts(BUILT_IN, 1)[0].text, n_rounds)
    reads = None
    if setting.storage_mbps is not None:
        weights = largest_weight_file(setting.model)
        reads = ReadLimit(weights, setting.storage_mbps * 10**6)
    for path in (setting.model, resolve_draft(setting.draft_model)):
        if path is not None:
            forget_model(path)
    result = result_of_child("bench.decode.prediction_run", spec, setting.memory_budget, reads)
    return {
        "model": str(setting.model),
        "memory_budget": setting.memory_budget,
        "storage_mbps": setting.storage_mbps,
        **result,
    }


def largest_error(rows: Sequence[Mapping[str, Any]]) -> float:
    """Of all predicted seconds and tokens per second, as a fraction."""
    return max(
        abs(error) for row in rows for kind in KINDS for error in row[kind]["error"].values()
    )


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Two lines for each setting: passes of one row, and with the draft.

    GB/s: the storage as measured before, which the prediction is made of, and after.
    """
    title = (
        f"{'model':<18} {'budget':>8} {'limit':>9} {'GB/s':>9} {'GB/pass':>7} {'rows':>4} "
        f"{'s/pass':>14} {'error':>6} {'tokens/s':>14} {'error':>6}"
    )
    lines = [title, f"{'':60}{'predicted real':>14} {'':>6} {'predicted real':>14}"]
    for row in rows:
        for kind in KINDS:
            lines.append(_line(row, row[kind], is_first=kind == KINDS[0]))
    lines.append(f"largest error {largest_error(rows):.1%}")
    return "\n".join(lines)


def _line(row: Mapping[str, Any], kind: Mapping[str, Any], is_first: bool) -> str:
    name = Path(row["model"]).name[:18] if is_first else ""
    budget = row["memory_budget"] if is_first else ""
    speed = row["storage_mbps"] or UNLIMITED if is_first else ""
    plan, after = row["plan"], row["storage_bytes_per_second_after"]
    storage = f"{plan['storage_bytes_per_second'] / 1e9:.2f}-{after / 1e9:.2f}" if is_first else ""
    streamed = f"{plan['streamed_bytes_per_pass'] / 1e9:.2f}" if is_first else ""
    line = f"{name:<18} {budget:>8} {speed:>9} {storage:>9} {streamed:>7} {kind['n_rows']:>4}"
    for figure in ("pass_seconds", "tokens_per_second"):
        values = kind["predicted"][figure], kind["measured"][figure]
        line += f"{values[0]:>8.3f}{values[1]:>7.3f} {kind['error'][figure]:>+6.1%}"
    return line


def _name(setting: Setting) -> str:
    speed = UNLIMITED if setting.storage_mbps is None else f"{setting.storage_mbps} MB/s"
    return f"{setting.model.name}, {setting.memory_budget}, storage {speed}"
