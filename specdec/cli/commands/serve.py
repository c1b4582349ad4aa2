"""`specdec serve`: a model for the clients of other programs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from offload.distribution import install_command
from offload.process.memory import count_companion
from specdec.cli import options
from specdec.cli.enforce import child_environment
from specdec.cli.errors import wants_debug
from specdec.cli.groups import ServedLoad, Serving, with_named_draft, with_options
from specdec.cli.input.settings import budget_reader
from specdec.cli.loading import open_model, run_again_enforced
from specdec.cli.notes import note_embedded, note_plain_transcript
from specdec.cli.output import SHOWN, say
from specdec.run_options import RunOptions
from specdec.serve.options import ServeOptions
from specdec.serve.process.child import starter, take_marker

if TYPE_CHECKING:
    from specdec.serve.run import Serving as Run


@with_options
def serve(
    context: typer.Context,
    load: ServedLoad,
    server: Serving,
    enforce: options.Enforce = False,
    verbose: options.Verbose = False,
) -> None:
    """Serve a model over HTTP: a chat page, and the APIs of OpenAI, Anthropic and Ollama."""
    marker = take_marker()
    if marker is not None:
        _run_engine(server, load, *marker, is_debug=wants_debug(context.obj.argv))
        return
    server.key()  # before anything is started
    if enforce:
        run_again_enforced(context, load.memory_budget)
    run = _import_server()
    argv = context.obj.argv
    # The engine is the same command: so it reads the same options and settings.
    start = starter([sys.executable, "-m", "specdec", *argv], child_environment())
    names = _names(server, load)
    shows = {"is_debug": wants_debug(argv), "logs_requests": SHOWN.plan}
    read_budget = budget_reader(context)
    ended = run(server, names, start, say, read_budget=read_budget, **shows).run()
    if ended.load_error:
        raise typer.Exit(ended.load_error)
    if ended.signal == signal.SIGINT:
        raise KeyboardInterrupt


def _run_engine(
    server: ServeOptions, load: RunOptions, number: int, server_bytes: int, *, is_debug: bool
) -> None:
    """Be the engine of a server. number: of the socket. server_bytes: memory of its process."""
    from specdec.serve.process.host import EngineHost
    from specdec.serve.process.messages import MessageSocket
    from specdec.serve.process.translation import Log

    count_companion(server_bytes)
    host = EngineHost(MessageSocket(number), server, Log(say, is_debug))
    host.start()
    load = with_named_draft(load)
    with open_model(load, load) as llm:
        note_plain_transcript(llm)
        note_embedded(load.model)
        host.run(llm)


def _import_server() -> type[Run]:
    try:
        from specdec.serve.run import Serving
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("specdec", "offload", "backends"):
            raise
        raise options.OptionError(
            f"specdec serve needs {error.name}: {install_command('serve')}"
        ) from error
    return Serving


def _names(server: ServeOptions, load: RunOptions) -> tuple[str, ...]:
    """Return the names of the model for clients; never a path of this machine."""
    model = str(load.model)
    own = Path(model).resolve().name if Path(model).exists() else model
    return server.aliases or (own,)
