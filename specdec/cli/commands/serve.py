"""`specdec serve`: a model for the clients of other programs."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from offload.distribution import install_command
from offload.errors import SpecdecError
from offload.process.memory import count_companion
from specdec.cli import options
from specdec.cli.enforce import child_environment
from specdec.cli.errors import wants_debug
from specdec.cli.groups import ServedLoad, Serving, with_named_draft, with_options
from specdec.cli.input.preset import Preset, read_preset
from specdec.cli.input.settings import budget_reader
from specdec.cli.libraries import import_for_good
from specdec.cli.loading import open_model, run_again_enforced
from specdec.cli.notes import note_embedded, note_plain_transcript
from specdec.cli.output import SHOWN, say
from specdec.models.names import check_local_name
from specdec.run_options import RunOptions
from specdec.serve.options import ServeOptions
from specdec.serve.process.child import Start, starter, take_marker, take_task, with_task
from specdec.serve.router.share import ModelOptions, Share

if TYPE_CHECKING:
    from specdec.serve.process.messages import MessageSocket
    from specdec.serve.router.planning import PlanTask
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
        _run_engine(server, *marker, is_debug=wants_debug(context.obj.argv))
        return
    server.key()  # before anything is started
    preset = _preset(context, load, server)
    if enforce:
        own_budget = context.params["memory_budget"]
        run_again_enforced(context, own_budget if preset is None else preset.memory_budget)
    run = _import_server()
    argv = context.obj.argv
    # The engine is the same command: so it reads the same options and settings.
    start = starter([sys.executable, "-m", "specdec", *argv], child_environment())
    if preset is not None:
        models, capacity = _planned(preset, start)
    else:
        assert load is not None, "it is named, or there is a preset"
        models, capacity = [_only(server, load)], None
    shows = {"is_debug": wants_debug(argv), "logs_requests": SHOWN.plan}
    starts = partial(_start_of, start)
    read_budget = None if preset else budget_reader(context)
    ended = run(server, models, capacity, starts, say, read_budget=read_budget, **shows).run()
    if ended.load_error:
        raise typer.Exit(ended.load_error)
    if ended.signal == signal.SIGINT:
        raise KeyboardInterrupt


def _preset(context: typer.Context, load: RunOptions | None, server: ServeOptions) -> Preset | None:
    """Return the models of --preset; None if -m names the only one. Raises OptionError."""
    source = context.get_parameter_source("model")
    is_named = source is not None and source.name == "COMMANDLINE"
    if server.preset is None:
        if load is None:
            raise options.OptionError("name a model with -m, or several with --preset FILE")
        return None
    if is_named:
        raise options.OptionError("give either -m or --preset, not both")
    return read_preset(server.preset, context, server.keep_alive_seconds)


def _planned(preset: Preset, start: Start) -> tuple[list[ModelOptions], Share]:
    """Return the models with their shares of memory, and what there is. Raises PresetError."""
    from specdec.serve.router.planning import PresetError, planned_elsewhere

    say(f"planning {', '.join(model.names[0] for model in preset.models)}")
    loads = [model.load for model in preset.models]
    planned = planned_elsewhere(start, loads, preset.memory_budget)
    models = []
    for model, plan in zip(preset.models, planned.models, strict=True):
        if plan.error:
            raise PresetError(f"the model {model.names[0]} cannot be loaded: {plan.error}")
        load = replace(model.load, memory_budget=plan.share.host_bytes)
        models.append(
            ModelOptions(
                model.names, load, plan.share, model.keep_alive, model.on_startup, plan.ctx_size
            )
        )
    return models, planned.capacity


def _only(server: ServeOptions, load: RunOptions) -> ModelOptions:
    return ModelOptions(_names(server, load), load, keep_alive=server.keep_alive_seconds)


def _start_of(start: Start, model: ModelOptions) -> Start:
    return with_task(start, model.load, shares_budget=model.share is not None)


def _run_engine(server: ServeOptions, number: int, server_bytes: int, *, is_debug: bool) -> None:
    """Be the engine of a server. number: of the socket. server_bytes: memory of its process."""
    from specdec.serve.process.host import EngineHost
    from specdec.serve.process.messages import MessageSocket
    from specdec.serve.process.translation import Log
    from specdec.serve.router.planning import PlanTask

    task, socket = take_task(), MessageSocket(number)
    if isinstance(task, PlanTask):
        _plan(task, socket)
        return
    load: RunOptions = task
    count_companion(server_bytes)
    host = EngineHost(socket, server, Log(say, is_debug))
    host.start()
    load = with_named_draft(load)
    with open_model(load, load) as llm:
        note_plain_transcript(llm)
        note_embedded(load.model)
        host.run(llm)


def _plan(task: PlanTask, socket: MessageSocket) -> None:
    """Send the plans of a preset's models, or what is wrong."""
    from specdec.serve.router.planning import plan_shares

    try:
        for load in task.loads:
            check_local_name(load.model)
            import_for_good(load)
        socket.send(plan_shares(task))
    except SpecdecError as error:
        socket.send(str(error))
    finally:
        socket.close()


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
