"""`specdec-bench timeline`: load, generate once with recording on, draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.process.results import write_whole
from bench.prompts.workloads import WARM_UP_TOKENS, Prompt
from bench.results import lossy_mark
from bench.timeline.lanes import chrome_trace, record_run
from bench.timeline.picture import check_matplotlib, draw


def run_timeline(
    keywords: dict[str, Any],
    prompt: Prompt,
    generation: dict[str, Any],
    picture: Path | None,
    trace: Path | None,
    n_steps: int,
    command: list[str],
) -> list[str]:
    """Run, draw and write; return the lines to show.

    keywords: those of `specdec.load`; generation: keywords of `LLM.generate`.
    """
    from specdec.api import load
    from specdec.cli.progress import loading_progress
    from specdec.models.names import resolve_draft

    if picture is not None:
        check_matplotlib()  # before the run, which may take minutes
    name = Path(keywords["model"]).name
    draft = resolve_draft(keywords["draft_model"])
    with loading_progress(f"loading {name}") as progress:
        llm = load(**keywords, progress=progress)
    with llm:
        llm.generate(prompt.text, **{**generation, "max_tokens": WARM_UP_TOKENS})
        timeline, stats = record_run(llm, prompt.text, generation, draft)
    lines = []
    if timeline.n_dropped:
        lines.append(f"{timeline.n_dropped} events were dropped: ask for fewer tokens")
    if trace is not None:
        events = chrome_trace(timeline, {"command": command, "stats": stats})
        write_whole(trace, json.dumps(events).encode())
        lines.append(f"{trace}: open it in chrome://tracing or ui.perfetto.dev")
    if picture is not None:
        if keywords["draft_model"] is not None and generation["speculative"]:
            name += f", draft {Path(keywords['draft_model']).name}"
        speed = (
            f"{stats['tokens_per_second']:.2f} tokens/s, "
            f"{stats['mean_acceptance_length']:.2f} tokens per pass, "
            f"{stats['bytes_streamed'] / 1e9:.2f} GB read{lossy_mark(stats)}"
        )
        sentence = draw(timeline, picture, title=f"{name}: {speed}", n_steps=n_steps)
        lines += [f"{picture}: {sentence}"]
    return lines
