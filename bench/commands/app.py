"""The `specdec-bench` command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import typer

from bench.commands.curve import curve_command
from bench.commands.demo import demo_command
from bench.commands.experts import experts_command
from bench.commands.peers import peers_command
from bench.commands.perplexity import perplexity_command
from bench.commands.policy import policy_command
from bench.commands.report import report_command
from bench.commands.speedup import speedup_command
from bench.commands.sweep import sweep_command
from bench.commands.throughput import throughput_command
from bench.commands.timeline import timeline_command
from specdec.cli.errors import run_app
from specdec.cli.groups import with_options
from specdec.cli.help import Command, Group

NAME = "specdec-bench"

app = typer.Typer(
    name=NAME,
    cls=Group,
    help="Measure specdec, and grow models to measure with.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PASSED_ON = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}

app.command("speedup", cls=Command)(with_options(speedup_command))
app.command("timeline", cls=Command)(with_options(timeline_command))
app.command("curve", cls=Command)(with_options(curve_command))
app.command("demo", cls=Command)(with_options(demo_command))
app.command("experts", cls=Command)(with_options(experts_command))
app.command("peers", cls=Command)(with_options(peers_command))
app.command("perplexity", cls=Command)(with_options(perplexity_command))
app.command("policy", cls=Command)(with_options(policy_command))
app.command("sweep", cls=Command)(with_options(sweep_command))
app.command("throughput", cls=Command)(with_options(throughput_command))
app.command("report", cls=Command)(with_options(report_command))


@app.command(context_settings=_PASSED_ON)
def synth(context: typer.Context) -> None:
    """Grow a small model to any size; its output stays the same."""
    _pass_on("synth", "bench.commands.synth", "synth_command", context.args)


@app.command("train-pair", context_settings=_PASSED_ON)
def train_pair(context: typer.Context) -> None:
    """Train the embedded pair from Python source found on this machine."""
    _pass_on("train-pair", "bench.train.train", "main", context.args)


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _pass_on(name: str, module: str, function: str, argv: Sequence[str]) -> None:
    """Run a command of a module that is imported only now, for it needs torch."""
    command_app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    command_app.command(cls=Command)(
        with_options(getattr(importlib.import_module(module), function))
    )
    raise typer.Exit(run_app(command_app, f"{NAME} {name}", argv))


def main(argv: Sequence[str] | None = None, name: str = NAME) -> int:
    """Run the command line under this name and return its exit code."""
    return run_app(app, name, sys.argv[1:] if argv is None else argv)
