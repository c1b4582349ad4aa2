"""`specdec run`: text on stdout, everything else on stderr."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli import options
from specdec.cli.groups import BeamSpan, ChatLoad, SamplingOrBeams, with_options
from specdec.cli.input.prompts import (
    note_unread_pipe,
    prompts_or_stdin,
    read_prompts,
    system_turn,
)
from specdec.cli.loading import open_model, run_again_enforced
from specdec.cli.notes import note_embedded, note_plain_transcript
from specdec.cli.output import say, say_hint, write_json, write_text
from specdec.cli.streaming import stream_text, was_cut
from specdec.run_options import DEFAULT_BEAM_SPAN, RunOptions

if TYPE_CHECKING:
    from specdec.api import LLM, CompletionOutput, GenerationResult

PromptText = Annotated[
    list[str] | None,
    typer.Option(
        "-p",
        "--prompt",
        help="The prompt, or several; - or none reads stdin.",
        show_default=False,
    ),
]
PromptFile = Annotated[
    list[Path] | None,
    typer.Option("-f", "--file", help="Read the prompt from this file.", show_default=False),
]
IsChat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Treat the prompt as a user's message: in the model's chat template, or as a plain "
        "transcript if it has none. This is the default for models with a template.",
    ),
]
IsRaw = Annotated[
    bool,
    typer.Option("--raw", help="Complete the prompt as it stands, without a chat template."),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--max-tokens",
        callback=options.as_token_limit,
        help="Maximum number of tokens to generate; -1: until the text ends or the context is "
        "full.",
        show_default="64; 512 for an answer in a chat template",
    ),
]
COMPLETION_TOKENS, ANSWER_TOKENS = 64, 512
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
    raw: IsRaw = False,
    system: options.System = None,
    max_tokens: MaxNewTokens = None,
    enforce: options.Enforce = False,
    json: options.Json = False,
    logprobs: Logprobs = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Answer one prompt or several; a model without a chat template continues the text."""
    prompt = prompts_or_stdin(prompt or [], file or [])
    is_chat = _is_chat(load, chat=chat, raw=raw, system=system)
    keywords = dict(sampling)
    if max_tokens is not None:
        keywords["max_tokens"] = max_tokens
    if logprobs is not None:
        keywords["logprobs"] = _checked_logprobs(logprobs, json, keywords)
    loading = with_beams(load, sampling.get("num_beams", 1), beam_span)
    if enforce:
        run_again_enforced(context, load.memory_budget)
    prompts = read_prompts(prompt, file or [])
    with open_model(load, loading) as llm:
        note_unread_pipe(prompt)
        if is_chat is None:
            is_chat = _follow_template(llm, load)
        elif is_chat:
            note_plain_transcript(llm)
        note_embedded(load.model)
        keywords.setdefault("max_tokens", ANSWER_TOKENS if is_chat else COMPLETION_TOKENS)
        _answer(llm, _prompts(prompts, is_chat, system), keywords, is_chat=is_chat, is_json=json)


def _is_chat(load: RunOptions, *, chat: bool, raw: bool, system: str | None) -> bool | None:
    """Return whether prompts are messages; None where that is the model's to decide."""
    if raw:
        for name, is_given in (("--chat", chat), ("--system", system is not None)):
            if is_given:
                raise options.OptionError(
                    f"--raw completes a text, {name} is about messages: leave one out"
                )
        for name, is_given in (
            ("--chat-template", load.chat_template is not None),
            ("--parse-special", load.parse_special),
        ):
            if is_given:
                say(f"note: {name} has no effect with --raw")
        return False
    return True if chat or system is not None or load.chat_template is not None else None


def _follow_template(llm: LLM, load: RunOptions) -> bool:
    """Return whether the model has a chat template, and print what follows from it."""
    if llm.tokenizer.has_chat_template:
        say_hint(
            "the prompt is given as a user's message in the model's chat template; "
            "--raw completes it as it stands"
        )
        return True
    if load.parse_special:
        say("note: --parse-special has no effect: the model has no chat template")
    return False


def _prompts(prompts: list[str], is_chat: bool, system: str | None) -> list[Any]:
    if not is_chat:
        return list(prompts)
    return [[*system_turn(system), {"role": "user", "content": text}] for text in prompts]


def _answer(
    llm: LLM, prompts: list[Any], keywords: dict[str, Any], *, is_chat: bool, is_json: bool
) -> None:
    for number, item in enumerate(prompts, 1):
        if is_json:
            write_json(result_to_dict(llm.generate(item, **keywords)))
            continue
        if len(prompts) > 1:
            write_text(f"=== {number} of {len(prompts)} ===\n")
        result = stream_text(llm, item, keywords)
        if is_chat and was_cut(result):
            limit = keywords["max_tokens"]
            say(f"note: the answer was cut after {limit} tokens; -n allows more")


def _checked_logprobs(n_likeliest: int, is_json: bool, keywords: dict[str, Any]) -> bool | int:
    """Return SamplingParams' `logprobs`. Raises SpecdecError, before anything is loaded."""
    if not is_json:
        raise options.OptionError("--logprobs is shown with --json only: add --json")
    from specdec.sampling.params import SamplingParams

    logprobs = n_likeliest or True
    SamplingParams(**keywords, logprobs=logprobs)
    return logprobs


def with_beams(load: RunOptions, num_beams: int, beam_span: int) -> RunOptions:
    """Return the options with memory for beams and without drafting."""
    if num_beams == 1:
        if beam_span != DEFAULT_BEAM_SPAN:
            raise options.OptionError("--beam-span has no effect without --num-beams: add it")
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
