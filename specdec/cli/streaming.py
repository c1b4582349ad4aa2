"""Generated text on stdout as it comes, then metrics and notes on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.cli.output import perf_parts, say, say_parts, write_text
from specdec.cli.progress import waiting

if TYPE_CHECKING:
    from specdec.api import LLM, GenerationResult
    from specdec.engine.stream import GenerationStream


def stream_text(llm: LLM, prompt: Any, keywords: dict[str, Any]) -> GenerationResult:
    """Generate, and write the text as it comes; several sequences have headings."""
    return write_stream(llm.stream(prompt, **keywords), keywords.get("n", 1))


def write_stream(stream: GenerationStream, n_sequences: int = 1) -> GenerationResult:
    """Write a stream's text as it comes, a line break after it, and its metrics."""
    last, index = "", -1
    with waiting("reading the prompt", lambda: _progress(stream)) as indicator:
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


def _progress(stream: GenerationStream) -> str:
    """Return how much of the prompt is computed; "" for one that takes a single pass."""
    progress = stream.progress
    if progress is None or not progress.num_processed:
        return ""
    return f"{progress.num_processed} of {progress.num_prompt_tokens} tokens"


def was_cut(result: GenerationResult) -> bool:
    """Return whether the limit of tokens ended an answer, and not the context, whose note says
    so already."""
    first = result.outputs[0]
    return first.finish_reason == "length" and first.finish_note is None
