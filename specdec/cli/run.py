"""`specdec run` and `specdec chat`: text on stdout, all else on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli import options
from specdec.cli.enforce import enforced_bytes, run_enforced
from specdec.cli.groups import LoadOptions, SamplingOptions
from specdec.cli.notes import (
    check_chat_template,
    check_models,
    note_left_out,
    note_plan,
)
from specdec.cli.output import loading_progress, perf_line, say, write_json, write_text
from specdec.cli.prompt_input import check_prompt_options, read_line, read_prompt
from specdec.cli.sampling_options import SequenceOptions, check_sampling
from specdec.cli.signature import with_options

if TYPE_CHECKING:
    from specdec.api import LLM, CompletionOutput, GenerationResult

Prompt = Annotated[
    str | None,
    typer.Option("-p", "--prompt", help="The prompt; - reads it from stdin.", show_default=False),
]
PromptFile = Annotated[
    Path | None,
    typer.Option("-f", "--file", help="Read the prompt from this file.", show_default=False),
]


@with_options
def run(
    context: typer.Context,
    load: LoadOptions,
    sampling: SamplingOptions,
    sequences: SequenceOptions,
    prompt: Prompt = None,
    file: PromptFile = None,
    max_tokens: options.MaxTokens = 64,
    prompt_cache_file: options.PromptCacheFile = None,
    enforce: options.Enforce = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Generate text from one prompt."""
    check_prompt_options(prompt, file)
    given = {**sampling.as_keywords(), **sequences.sampling_keywords()}
    keywords = {"max_tokens": max_tokens, **given}
    check_sampling(keywords)
    loading = {**sequences.load_keywords(load), "prompt_cache_file": prompt_cache_file}
    if enforce:
        run_again_enforced(context, load.memory_budget)
    text = read_prompt(prompt, file)
    with open_model(load, loading) as llm:
        if json:
            write_json(result_to_dict(llm.generate(text, **keywords)))
        else:
            stream_text(llm, text, keywords)


@with_options
def chat(
    context: typer.Context,
    load: LoadOptions,
    sampling: SamplingOptions,
    max_tokens: options.MaxTokens = 512,
    prompt_cache_file: options.PromptCacheFile = None,
    enforce: options.Enforce = False,
    debug: options.Debug = False,
) -> None:
    """Talk to a model. Ctrl-C stops an answer; Ctrl-D or /exit ends the conversation."""
    if enforce:
        run_again_enforced(context, load.memory_budget)
    from specdec.api import PromptError

    keywords = {"max_tokens": max_tokens, **sampling.as_keywords()}
    messages: list[dict[str, str]] = []
    loading = {**load.as_keywords(), "prompt_cache_file": prompt_cache_file}
    with open_model(load, loading) as llm:
        check_chat_template(llm, load.model)
        while (line := read_line()) is not None:
            messages.append({"role": "user", "content": line})
            try:
                answer = stream_text(llm, messages, keywords).text
            except KeyboardInterrupt:  # the question goes with its answer
                messages.pop()
                write_text("\n")
                say("stopped; Ctrl-D ends")
            except PromptError as error:  # a full context: the conversation is not lost
                messages.pop()
                say(f"error: {error}")
            else:
                messages.append({"role": "assistant", "content": answer})


def run_again_enforced(context: typer.Context, memory_budget: str) -> None:
    """In the parent: run this command again under the limit and exit as it did."""
    if enforced_bytes() is None:
        raise typer.Exit(run_enforced("specdec", context.obj.argv, memory_budget))


@contextmanager
def open_model(load_options: LoadOptions, keywords: dict[str, Any]) -> Iterator[LLM]:
    """keywords: of `specdec.load`."""
    check_models(load_options)
    from specdec.api import load

    with loading_progress(f"loading {load_options.model}") as progress:
        llm = load(**keywords, progress=progress)
    with llm:
        note_plan(load_options, llm.plan)
        note_left_out(llm.plan)
        yield llm


def stream_text(llm: LLM, prompt: Any, keywords: dict[str, Any]) -> GenerationResult:
    """Write the text as it comes, several sequences below headings; then the perf line."""
    stream = llm.stream(prompt, **keywords)
    last, index, n_sequences = "", -1, keywords.get("n", 1)
    for chunk in stream:
        if n_sequences > 1 and chunk.index > index:
            index = chunk.index
            write_text(("\n" if index else "") + f"--- {index + 1} of {n_sequences} ---\n")
        write_text(chunk.text)
        last = chunk.text or last
    if not last.endswith("\n"):
        write_text("\n")
    result = stream.result
    say(perf_line(result.stats.to_dict()))
    return result


def result_to_dict(result: GenerationResult) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "outputs": [_output_to_dict(output) for output in result.outputs],
        "stats": result.stats.to_dict(),
    }


def _output_to_dict(output: CompletionOutput) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "score": output.score,
    }
