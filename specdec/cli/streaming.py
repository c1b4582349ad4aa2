"""Generated text on stdout as it comes, then metrics and notes on stderr."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from specdec.cli.output import perf_parts, say, say_parts, write_text
from specdec.cli.progress import waiting

if TYPE_CHECKING:
    from specdec.api import LLM, GenerationResult
    from specdec.engine.sequences.outputs import PromptProgress
    from specdec.engine.stream import GenerationStream


def stream_text(llm: LLM, prompt: Any, keywords: dict[str, Any]) -> GenerationResult:
    """Generate, and write the text as it comes; several sequences have headings."""
    return write_stream(llm.stream(prompt, **keywords), keywords.get("n", 1))


def write_stream(stream: GenerationStream, n_sequences: int = 1) -> GenerationResult:
    """Write a stream's text as it comes, a line break after it, and its metrics."""
    last, index = "", -1
    with waiting("reading the prompt", lambda: prompt_progress(stream.progress)) as indicator:
        for chunk in stream:
            indicator.end()
            if n_sequences > 1 and chunk.index > index:
                index = chunk.index
                write_text(("\n" if index else "") + f"--- {index + 1} of {n_sequences} ---\n")
            write_text(chunk.text)
            last = chunk.text or last
    if not last.endswith("\n"):
        write_text("\n")
    result = stream.result
    say_parts(perf_parts(result.stats.to_dict()))
    for note in dict.fromkeys(output.finish_note for output in result.outputs):
        if note is not None:
            say(f"note: {note}")
    return result


def prompt_progress(progress: PromptProgress | None) -> str:
    """Return how much of a prompt is computed, and the time left; "" before its first pass ends."""
    if progress is None or not progress.num_processed:
        return ""
    computed = f"{progress.num_processed} of {progress.num_prompt_tokens} tokens"
    seconds = progress.seconds_left
    return computed if seconds is None else f"{computed}, {timedelta(seconds=round(seconds))} left"


def was_cut(result: GenerationResult) -> bool:
    """Return whether the limit of tokens ended an answer, and not the context, whose note says
    so already."""
    first = result.outputs[0]
    return first.finish_reason == "length" and first.finish_note is None
