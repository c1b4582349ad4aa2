"""`specdec run` and `specdec chat`: text on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli import options
from specdec.cli.groups import (
    BeamSpan,
    ChatLoad,
    Sampling,
    SamplingOrBeams,
    with_options,
)
from specdec.cli.input.prompts import check_prompt_options, read_line, read_prompts
from specdec.cli.loading import open_model, run_again_enforced
from specdec.cli.notes import note_plain_transcript
from specdec.cli.output import perf_line, say, say_figures, write_json, write_text
from specdec.run_options import DEFAULT_BEAM_SPAN, RunOptions

if TYPE_CHECKING:
    from specdec.api import LLM, CompletionOutput, GenerationResult

PromptText = Annotated[
    list[str] | None,
    typer.Option(
        "-p", "--prompt", help="The prompt, or several; - reads stdin.", show_default=False
    ),
]
PromptFile = Annotated[
    list[Path] | None,
    typer.Option("-f", "--file", help="Read the prompt from this file.", show_default=False),
]
IsChat = Annotated[
    bool,
    typer.Option(
        "--chat", help="Treat the prompt as a user's turn and apply the model's chat template."
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        min=0,
        metavar="K",
        help="With --json: log-probabilities of the tokens, and of the K likeliest.",
        show_default="none",
    ),
]


@with_options
def run(
    context: typer.Context,
    load: ChatLoad,
    sampling: SamplingOrBeams,
    beam_span: BeamSpan = DEFAULT_BEAM_SPAN,
    prompt: PromptText = None,
    file: PromptFile = None,
    chat: IsChat = False,
    system: options.System = None,
    max_tokens: options.MaxTokens = 64,
    enforce: options.Enforce = False,
    json: options.Json = False,
    logprobs: Logprobs = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Generate text from a prompt, or from several one after the other."""
    check_prompt_options(prompt or [], file or [])
    keywords = {"max_tokens": max_tokens, **sampling}
    if logprobs is not None:
        keywords["logprobs"] = _checked_logprobs(logprobs, json, keywords)
    is_chat = chat or system is not None
    for name, is_given in (
        ("--chat-template", load.chat_template is not None),
        ("--parse-special", load.parse_special),
    ):
        if is_given and not is_chat:
            say(f"note: {name} has no effect without --chat or --system")
    loading = with_beams(load, sampling.get("num_beams", 1), beam_span)
    if enforce:
        run_again_enforced(context, load.memory_budget)
    prompts: list[Any] = list(read_prompts(prompt or [], file or []))
    if is_chat:
        prompts = [[*system_turn(system), {"role": "user", "content": item}] for item in prompts]
    with open_model(load, loading) as llm:
        if is_chat:
            note_plain_transcript(llm)
        for number, item in enumerate(prompts, 1):
            if json:
                write_json(result_to_dict(llm.generate(item, **keywords)))
                continue
            if len(prompts) > 1:
                write_text(f"=== {number} of {len(prompts)} ===\n")
            stream_text(llm, item, keywords)


def _checked_logprobs(n_likeliest: int, is_json: bool, keywords: dict[str, Any]) -> bool | int:
    """Return SamplingParams' `logprobs`. Raises SpecdecError, before anything is loaded."""
    if not is_json:
        raise options.OptionError("--logprobs is shown with --json only: add --json")
    from specdec.sampling.params import SamplingParams

    logprobs = n_likeliest or True
    SamplingParams(**keywords, logprobs=logprobs)
    return logprobs


def system_turn(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


@with_options
def chat(
    context: typer.Context,
    load: ChatLoad,
    sampling: Sampling,
    system: options.System = None,
    max_tokens: options.MaxTokens = 512,
    enforce: options.Enforce = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Talk to a model. Ctrl-C stops an answer; Ctrl-D or /exit ends the conversation."""
    if enforce:
        run_again_enforced(context, load.memory_budget)
    from specdec.api import PromptError

    keywords = {"max_tokens": max_tokens, **sampling}
    messages, has_failed = system_turn(system), False
    with open_model(load, load) as llm:
        note_plain_transcript(llm)
        while (line := read_line()) is not None:
            messages.append({"role": "user", "content": line})
            try:
                result = stream_text(llm, messages, keywords)
            except KeyboardInterrupt:  # the question is dropped with its answer
                messages.pop()
                write_text("\n")
                say("stopped; Ctrl-D ends")
            except PromptError as error:  # a full context: the conversation is not lost
                messages.pop()
                has_failed = True
                say(f"error: {error}")
            else:
                messages.append({"role": "assistant", "content": result.text})
                if result.finish_reason == "length" and result.outputs[0].finish_note is None:
                    say(f"note: the answer was cut after --max-tokens {max_tokens} tokens")
    if has_failed and not sys.stdin.isatty():  # a script cannot see that an answer is missing
        raise typer.Exit(2)


def with_beams(load: RunOptions, num_beams: int, beam_span: int) -> RunOptions:
    """Return the options with memory for beams and without drafting."""
    if num_beams == 1:
        if beam_span != DEFAULT_BEAM_SPAN:
            raise options.OptionError("--beam-span is given without --num-beams: it is about beams")
        return load
    given = {
        "--draft-model": load.draft_model is not None,
        "--spec-type": load.spec_type not in (None, ()),
        "--num-draft-tokens": load.num_draft_tokens not in (None, 0),
        "--tree-width": load.tree_width is not None,
        "--acceptance": load.acceptance != "match",
        "--accept-threshold": load.accept_threshold is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise options.OptionError(
                f"--num-beams {num_beams} does not draft: a pass scores all beams; leave {name} out"
            )
    return replace(load, spec_type=(), num_beams=num_beams, beam_span=beam_span)


def stream_text(llm: LLM, prompt: Any, keywords: dict[str, Any]) -> GenerationResult:
    """Write the text as it is generated, several sequences under headings, then the perf line."""
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
    say_figures(perf_line(result.stats.to_dict()))
    for note in dict.fromkeys(output.finish_note for output in result.outputs):
        if note is not None:
            say(f"note: {note}")
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
        **output.note,
        "seed": output.seed,
        "score": output.score,
        **({} if output.logprobs is None else _logprobs_to_dict(output)),
    }


def _logprobs_to_dict(output: CompletionOutput) -> dict[str, Any]:
    """Return log-probabilities of the tokens, and [token, log-probability] of the likeliest."""
    top = output.top_logprobs
    likeliest = None if top is None else [[list(pair) for pair in item.items()] for item in top]
    return {"logprobs": list(output.logprobs or ()), "top_logprobs": likeliest}
