"""`specdec chat`: a conversation; answers on stdout, everything else on stderr."""

from __future__ import annotations

import sys

import typer

from specdec.cli import options
from specdec.cli.groups import ChatLoad, Sampling, with_options
from specdec.cli.loading import open_model, run_again_enforced
from specdec.cli.notes import note_embedded, note_plain_transcript
from specdec.cli.output import say_figures


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
    """Talk to a model. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves."""
    if enforce:
        run_again_enforced(context, load.memory_budget)
    from specdec.cli.chat.answers import Chat
    from specdec.cli.chat.commands import command_words
    from specdec.cli.chat.conversation import Conversation
    from specdec.cli.chat.editor import is_interactive, message_reader
    from specdec.cli.chat.loop import converse
    from specdec.cli.chat.settings import Settings

    settings = Settings({"max_tokens": max_tokens, **sampling})
    with open_model(load, load) as llm:
        note_plain_transcript(llm)
        note_embedded(load.model)
        if is_interactive():
            say_figures(
                f"{load.model}, context {llm.max_context} tokens; /help lists the commands, "
                "Ctrl-D leaves"
            )
        talk = Chat(llm, Conversation(system), settings)
        converse(talk, message_reader(command_words()))
    if talk.has_failed and not sys.stdin.isatty():  # a script cannot see that an answer is missing
        raise typer.Exit(2)
