"""The `specdec` command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from specdec import __version__
from specdec.cli.commands import analyze as cli_analyze
from specdec.cli.commands import batch as cli_batch
from specdec.cli.commands import chat as cli_chat
from specdec.cli.commands import check as cli_check
from specdec.cli.commands import info as cli_info
from specdec.cli.commands import models as cli_models
from specdec.cli.commands import pack as cli_pack
from specdec.cli.commands import recommend as cli_recommend
from specdec.cli.commands import run as cli_run
from specdec.cli.commands import serve as cli_serve
from specdec.cli.commands import servers as cli_servers
from specdec.cli.commands import train_draft as cli_train_draft
from specdec.cli.errors import run_app
from specdec.cli.help import Command, Group
from specdec.cli.input.settings import FILE_VARIABLE, name_variables, own_file, read_defaults
from specdec.cli.libraries import quiet_libraries
from specdec.cli.naming import DEFAULTS_FILE, variable_of
from specdec.cli.options import OptionError
from specdec.cli.output import write_text

app = typer.Typer(
    name="specdec",
    cls=Group,
    help="Run a language model that is larger than the memory it may use.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_GENERATE, _ADVISE, _MODELS, _SERVERS = "Generate", "Before a run", "Models", "Servers"
_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    _GENERATE: {
        "run": cli_run.run,
        "chat": cli_chat.chat,
        "serve": cli_serve.serve,
        "batch": cli_batch.batch,
    },
    _ADVISE: {
        "plan": cli_info.plan,
        "recommend": cli_recommend.recommend,
        "check": cli_check.check,
        "profile": cli_info.profile,
        "analyze": cli_analyze.analyze,
    },
    _MODELS: {
        "models": cli_models.models,
        "pull": cli_models.pull,
        "rm": cli_models.rm,
        "pack": cli_pack.pack,
        "train-draft": cli_train_draft.train_draft,
    },
    _SERVERS: {"ps": cli_servers.ps, "stop": cli_servers.stop},
}
for _panel, _of_panel in _COMMANDS.items():
    for _name, _function in _of_panel.items():
        app.command(_name, cls=Command, rich_help_panel=_panel)(_function)
# Its options are those of `specdec-bench demo`, the help included.
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}
app.command("demo", context_settings=_PASSED_ON, rich_help_panel=_ADVISE)(cli_info.demo)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        write_text(f"specdec {__version__}\n")
        raise typer.Exit(0)


def _take_defaults(context: typer.Context, path: Path | None) -> Path | None:
    name_variables(context.command)
    file = path or own_file()
    if file is not None:
        try:
            context.default_map = read_defaults(file, context.command)
        except OptionError as error:
            variable = variable_of(context, "config")
            raise error if variable is None else OptionError(f"{variable}: {error}") from error
        context.meta[DEFAULTS_FILE] = file
    return path


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            envvar=FILE_VARIABLE,
            callback=_take_defaults,
            is_eager=True,
            help="A TOML file with options.",
            show_default="~/.config/specdec/config.toml",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version.",
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        write_text(context.get_help() + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    quiet_libraries()
    return run_app(app, "specdec", sys.argv[1:] if argv is None else argv)
