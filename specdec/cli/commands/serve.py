"""`specdec serve`: a model for the clients of other programs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from offload.distribution import install_command
from offload.errors import SpecdecError
from offload.process.memory import count_companion
from specdec import __version__
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
from specdec.run_options import AUTO, CPU, RunOptions
from specdec.serve.options import ServeOptions
from specdec.serve.process.child import (
    EngineTask,
    Start,
    starter,
    take_marker,
    take_task,
    with_task,
)
from specdec.serve.router.share import ModelOptions, Share, Starter

if TYPE_CHECKING:
    from specdec.serve.process.messages import MessageSocket
    from specdec.serve.process.ray_engine import Machines
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
        _run_engine(*marker, is_debug=wants_debug(context.obj.argv))
        return
    server.key()  # before anything is started
    preset = _preset(context, load, server)
    if server.ray is not None:
        _check_ray(load, enforce=enforce)
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
        _check_models(load)
        models, capacity = [_only(server, load)], None
    shows = {"is_debug": wants_debug(argv), "logs_requests": SHOWN.plan}
    read_budget = None if preset else budget_reader(context)
    with _starters(server, load, start, argv) as starters:
        ended = run(server, models, capacity, starters, say, read_budget=read_budget, **shows).run()
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


def _check_models(load: RunOptions) -> None:
    """Raise SpecdecError for names that can be no models and for files that cannot be read, before
    anything listens."""
    from specdec.models.headers import check_headers

    is_chosen = load.draft_model == AUTO  # by the engine, which knows each machine's own
    check_headers(load.model, None if is_chosen else load.draft_model)


@contextmanager
def _starters(
    server: ServeOptions, load: RunOptions | None, start: Start, argv: Sequence[str]
) -> Iterator[Sequence[Starter]]:
    """Yield what starts the engines of a model: here, or on the machines of a Ray cluster."""
    limits = replace(server, api_key=None, api_key_file=None)  # engines see no client
    if server.ray is None or load is None:
        yield [partial(_start_locally, start, limits)]
        return
    from specdec.cluster.machines import shared_fingerprint
    from specdec.serve.process.ray_engine import open_machines

    weights = shared_fingerprint(load.model)
    make_start = partial(_remote_start, ["serve", "-m", str(load.model), *_shown_options(argv)])
    with open_machines(server.ray, server.replicas) as machines:
        yield [
            partial(_start_remotely, machines, number, make_start, limits, weights)
            for number in machines.replicas
        ]


def _start_locally(start: Start, server: ServeOptions, model: ModelOptions) -> Start:
    task = EngineTask(model.load, server)
    return with_task(start, task, shares_budget=model.share is not None)


def _start_remotely(
    machines: Machines,
    replica: int,
    make_start: Callable[[], Start],
    server: ServeOptions,
    weights: str | None,
    model: ModelOptions,
) -> Start:
    from specdec.cluster.machines import with_absolute_paths
    from specdec.serve.process.ray_engine import ray_start
    from specdec.serve.process.ray_relay import RemoteTask

    engine = EngineTask(with_absolute_paths(model.load), server)
    task = RemoteTask(make_start, engine, __version__, weights, str(model.load.model))
    return ray_start(machines, replica, task, say)


def _remote_start(argv: Sequence[str]) -> Start:
    """Return the function that starts an engine on this machine for a server on another one."""
    command = [sys.executable, "-m", "specdec", *argv]
    return starter(command, child_environment(), subprocess.PIPE)


def _shown_options(argv: Sequence[str]) -> list[str]:
    """Return the options about what an engine prints; it gets the others with its task."""
    return [*["--debug"] * wants_debug(argv), *["-v"] * SHOWN.plan]


def _check_ray(load: RunOptions | None, *, enforce: bool) -> None:
    """Raise OptionError for options that do not go with --ray."""
    if enforce:
        raise options.OptionError(
            "--enforce limits this machine's processes only, and --ray starts others: leave one out"
        )
    if load is not None and load.record_traces is not None:
        raise options.OptionError(
            "--record-traces takes one writer, and --ray has many engines: leave one out"
        )
    if load is not None and (load.device != CPU or load.draft_device not in (CPU, AUTO)):
        raise options.OptionError(
            "--ray runs engines on processors: leave out --device and --draft-device"
        )


def _run_engine(number: int, server_bytes: int, *, is_debug: bool) -> None:
    """Be the engine of a server. number: of the socket. server_bytes: memory of its process."""
    from specdec.serve.process.host import EngineHost
    from specdec.serve.process.messages import MessageSocket
    from specdec.serve.process.translation import Log
    from specdec.serve.router.planning import PlanTask

    task, socket = take_task(), MessageSocket(number)
    if isinstance(task, PlanTask):
        _plan(task, socket)
        return
    assert isinstance(task, EngineTask), "a server has only these tasks"
    count_companion(server_bytes)
    host = EngineHost(socket, task.server, Log(say, is_debug))
    host.start()
    load = with_named_draft(task.load)
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
