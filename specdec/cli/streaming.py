"""Generated text on stdout as it comes, then the perf line and notes on stderr."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from specdec.cli.output import perf_line, prompt_progress, say, say_figures, write_text

if TYPE_CHECKING:
    from specdec.api import LLM, GenerationResult
    from specdec.engine.stream import GenerationStream


def stream_text(llm: LLM, prompt: Any, keywords: dict[str, Any]) -> GenerationResult:
    """Generate, and write the text as it comes; several sequences have headings."""
    return write_stream(llm.stream(prompt, **keywords), keywords.get("n", 1))


def write_stream(stream: GenerationStream, n_sequences: int = 1) -> GenerationResult:
    """Write a stream's text as it comes, a line break after it, and the perf line."""
    last, index = "", -1
    with prompt_progress() as show:
        stream.start(on_output=lambda: show(stream.progress))
        first = next(stream, None)
    for chunk in () if first is None else chain((first,), stream):
        if n_sequences > 1 and chunk.index > index:
            index = chunk.index
            write_text(("\n" if index else "") + f"--- {index + 1} of {n_sequences} ---\n")
        write_text(chunk.text)
        last = chunk.text or last
    if not last.endswith("\n"):
        write_text("\n")
    result = stream.result
    say_figures(perf_line(result.stats.to_dict()))
    for note in dict.fromkeys(output.finish_note for output in result.outputs):
        if note is not None:
            say(f"note: {note}")
    return result


def was_cut(result: GenerationResult) -> bool:
    """Return whether the limit of tokens ended an answer, and not the context, whose note says
    so already."""
    first = result.outputs[0]
    return first.finish_reason == "length" and first.finish_note is None
