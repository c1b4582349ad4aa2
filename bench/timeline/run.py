"""`specdec-bench timeline`: load, generate once with recording on, draw."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import lossy_mark
from bench.prompts.workloads import Prompt
from bench.timeline.lanes import chrome_trace, record_run, write_trace
from bench.timeline.picture import check_matplotlib, draw

_WARM_UP_TOKENS = 3  # the first pass pays for threads, caches and scratch memory


@dataclass(frozen=True)
class TimelineRun:
    """What to run and where to draw it."""

    load: dict[str, Any]
    """Keywords of `specdec.load`."""
    prompt: Prompt
    generation: dict[str, Any]
    """Keywords of `LLM.generate`."""
    picture: Path | None
    trace: Path | None
    n_rounds: int
    command: list[str]


def run_timeline(run: TimelineRun) -> list[str]:
    """Run, draw and write; the lines to show."""
    from specdec.api import load
    from specdec.cli.output import loading_progress
    from specdec.models.names import resolve_draft

    if run.picture is not None:
        check_matplotlib()  # before minutes are spent
    name = Path(run.load["model"]).name
    draft = resolve_draft(run.load["draft_model"])
    with loading_progress(f"loading {name}") as progress:
        llm = load(**run.load, progress=progress)
    with llm:
        llm.generate(run.prompt.text, **{**run.generation, "max_tokens": _WARM_UP_TOKENS})
        timeline, stats = record_run(llm, run.prompt.text, run.generation, draft)
    lines = []
    if timeline.n_dropped:
        lines.append(f"{timeline.n_dropped} events were not kept: ask for fewer tokens")
    if run.trace is not None:
        write_trace(run.trace, chrome_trace(timeline, {"command": run.command, "stats": stats}))
        lines.append(f"{run.trace}: open it in chrome://tracing or ui.perfetto.dev")
    if run.picture is not None:
        title = (
            name
            if run.load["draft_model"] is None or not run.generation["speculative"]
            else (f"{name}, draft {Path(run.load['draft_model']).name}")
        )
        speed = (
            f"{stats['tokens_per_second']:.2f} tokens/s, "
            f"{stats['mean_acceptance_length']:.2f} tokens per pass, "
            f"{stats['bytes_streamed'] / 1e9:.2f} GB read{lossy_mark(stats)}"
        )
        sentence = draw(timeline, run.picture, title=f"{title}: {speed}", n_rounds=run.n_rounds)
        lines += [f"{run.picture}: {sentence}"]
    return lines
