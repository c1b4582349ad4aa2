"""`specdec serve`: a model for the clients of other programs."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specdec.cli import options
from specdec.cli.errors import wants_debug
from specdec.cli.groups import ChatLoad, Serving, with_options
from specdec.cli.loading import open_model, run_again_enforced
from specdec.cli.notes import note_embedded, note_plain_transcript
from specdec.cli.output import SHOWN, say
from specdec.run_options import RunOptions
from specdec.serve.options import ServeOptions

if TYPE_CHECKING:
    from specdec.api import LLM


@with_options
def serve(
    context: typer.Context,
    load: ChatLoad,
    server: Serving,
    enforce: options.Enforce = False,
    verbose: options.Verbose = False,
) -> None:
    """Serve a model over HTTP: a chat page, and the APIs of OpenAI, Anthropic and Ollama."""
    server.key()  # before anything is started
    if enforce:
        run_again_enforced(context, load.memory_budget)
    # Imported first: its memory counts as used when the plan is made.
    run = _import_server()
    with ExitStack() as stack:

        def open_it() -> LLM:
            llm = stack.enter_context(open_model(load, load))
            note_plain_transcript(llm)
            note_embedded(load.model)
            return llm

        is_debug = wants_debug(context.obj.argv)
        shows = {"is_debug": is_debug, "logs_requests": SHOWN.plan}
        number = run(server, _names(server, load), open_it, say, **shows).run()
    if number == signal.SIGINT:
        raise KeyboardInterrupt


def _import_server() -> type:
    try:
        from specdec.serve.run import Serving as Run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("specdec", "offload", "backends"):
            raise
        raise options.OptionError(
            f"specdec serve needs {error.name}: pip install 'specdec[serve]'"
        ) from error
    return Run


def _names(server: ServeOptions, load: RunOptions) -> tuple[str, ...]:
    """Return the names of the model for clients; never a path of this machine."""
    model = str(load.model)
    own = Path(model).resolve().name if Path(model).exists() else model
    return server.aliases or (own,)
