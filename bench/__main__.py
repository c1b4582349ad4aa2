"""The `specdec-bench` command."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench.curve_cli import curve_command
from bench.options import (
    IgnoreEos,
    NPrompts,
    Output,
    OutputFile,
    PeerMemory,
    Prompts,
    UsageMistake,
    check_output,
    check_writable,
    sampling_keywords,
)
from bench.peers_cli import peers_command
from bench.policy_cli import policy_command
from bench.report_cli import report_command
from bench.sweep_cli import sweep_command
from bench.workloads import BUILT_IN, read_prompts
from specdec import cli_options as options
from specdec.cli_errors import run_app
from specdec.cli_groups import LoadOptions, SamplingOptions
from specdec.cli_info import COMMAND_NAME
from specdec.cli_signature import with_debug, with_options

app = typer.Typer(
    name="specdec-bench",
    help="Measure specdec, and grow models to measure with.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SpeedupPeer = Annotated[
    str | None,
    typer.Option(
        "--peer",
        metavar="accelerate|llama.cpp|llama.cpp-draft",
        help="Compare with this program too.",
    ),
]
PeerPrompts = Annotated[int, typer.Option("--peer-prompts", min=1, help="Prompts for the peer.")]
PeerTokens = Annotated[int, typer.Option("--peer-tokens", min=2, help="Tokens per prompt.")]
Log = Annotated[
    Path | None,
    typer.Option("--log", help="Append each prompt's records here at once, as JSON lines."),
]


@app.command()
@with_options
def speedup(
    context: typer.Context,
    load: LoadOptions,
    sampling: SamplingOptions,
    prompts: Prompts = BUILT_IN,
    n_prompts: NPrompts = 16,
    max_tokens: options.MaxTokens = 64,
    enforce: options.Enforce = False,
    ignore_eos: IgnoreEos = False,
    peer: SpeedupPeer = None,
    peer_prompts: PeerPrompts = 4,
    peer_tokens: PeerTokens = 8,
    peer_cpu_memory: PeerMemory = None,
    output: Output = "table",
    output_file: OutputFile = None,
    log: Log = None,
    debug: options.Debug = False,
) -> None:
    """Plain streamed decoding against speculative decoding of the same target."""
    from bench.results import write_json
    from bench.speedup import SpeedupRun, run_speedup
    from bench.table import format_report
    from offload.units import parse_bytes
    from specdec.models import resolve_model

    _check_choices(output, peer, load, enforce, output_file, log)
    run = SpeedupRun(
        load={**load.as_keywords(), "model": str(resolve_model(load.model))},
        prompts=read_prompts(prompts, n_prompts),
        sampling=sampling_keywords(max_tokens, ignore_eos, sampling),
        enforce=enforce,
        log=log,
        peer=peer,
        peer_prompts=peer_prompts,
        peer_tokens=peer_tokens,
        peer_cpu_memory=parse_bytes(peer_cpu_memory) if peer_cpu_memory else None,
    )
    result = run_speedup(run, ["specdec-bench", *context.obj.argv])
    if output_file is not None:
        write_json(result, output_file)
    if output == "json":
        write_json(result, None)
    else:
        typer.echo(format_report(result))


@app.command()
@with_options
def budgets(
    context: typer.Context,
    load: LoadOptions,
    sampling: SamplingOptions,
    sizes: Annotated[
        str, typer.Option("--budgets", metavar="SIZE,SIZE,...", help="Memory budgets to try.")
    ],
    prompts: Prompts = BUILT_IN,
    n_prompts: NPrompts = 16,
    max_tokens: options.MaxTokens = 64,
    enforce: options.Enforce = False,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", help="Report of `speedup` whose texts these must equal."),
    ] = None,
    output_file: OutputFile = None,
    debug: options.Debug = False,
) -> None:
    """The same prompts at several budgets: nothing killed, and the same texts?"""
    from bench.budgets import format_rows, run_budgets
    from bench.results import write_json
    from offload.units import parse_bytes
    from specdec.models import resolve_model

    names = sizes.split(",")
    for name in names:
        parse_bytes(name)
    result = run_budgets(
        {**load.as_keywords(), "model": str(resolve_model(load.model))},
        read_prompts(prompts, n_prompts),
        sampling_keywords(max_tokens, False, sampling),
        names,
        ["specdec-bench", *context.obj.argv],
        enforce=enforce,
        reference=reference,
    )
    if output_file is not None:
        write_json(result, output_file)
    typer.echo(format_rows(result))


@app.command()
@with_options
def timeline(
    context: typer.Context,
    load: LoadOptions,
    sampling: SamplingOptions,
    picture: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="PNG", help="Where to draw the picture."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="JSON", help="Write all events for chrome://tracing or Perfetto."
        ),
    ] = None,
    prompts: Prompts = BUILT_IN,
    max_tokens: options.MaxTokens = 32,
    rounds: Annotated[
        int,
        typer.Option("--rounds", min=0, help="Rounds to draw, from the middle; 0 draws all."),
    ] = 3,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without speculation.")] = False,
    ignore_eos: IgnoreEos = False,
    debug: options.Debug = False,
) -> None:
    """Draw one run as a Gantt chart: reads, target layers, drafting, acceptance."""
    from bench.timeline_run import TimelineRun, run_timeline

    if picture is None and trace is None:
        raise UsageMistake("nowhere to draw: give -o PICTURE.png, --trace EVENTS.json or both")
    for option, path in (("--output", picture), ("--trace", trace)):
        if path is not None:
            check_writable(option, path)
    run = TimelineRun(
        load=load.as_keywords(),
        prompt=read_prompts(prompts, 1)[0],
        generation={
            **sampling_keywords(max_tokens, ignore_eos, sampling),
            "speculative": not plain,
        },
        picture=picture,
        trace=trace,
        n_rounds=rounds,
        command=["specdec-bench", *context.obj.argv],
    )
    typer.echo("\n".join(run_timeline(run)))


@app.command()
def demo(
    size: Annotated[str, typer.Option("--size", help="Size of the grown target.")] = "auto",
    memory_budget: Annotated[
        str, typer.Option("--memory-budget", help="At most half the target.")
    ] = "auto",
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to put the target.", show_default="the cache folder"),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the grown target.")] = False,
    format: Annotated[
        str, typer.Option("--format", metavar="hf|gguf", help="Format of the target and draft.")
    ] = "hf",
    debug: options.Debug = False,
) -> None:
    """A grown target of at least twice its budget, plain against speculative; about two minutes."""
    from bench.demo import run_demo

    run_demo(size=size, memory_budget=memory_budget, directory=directory, keep=keep, format=format)


_PASSED_ON = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}


app.command("curve")(with_options(curve_command))
app.command("peers")(with_options(peers_command))
app.command("policy")(with_options(policy_command))
app.command("sweep")(with_options(sweep_command))
app.command("report")(with_debug(report_command))


@app.command(context_settings=_PASSED_ON)
def synth(context: typer.Context) -> None:
    """Grow a small model to any size; its text stays the same."""
    _pass_on("synth", "bench.synth_cli", "synth_command", context.args)


@app.command(context_settings=_PASSED_ON)
def predict(context: typer.Context) -> None:
    """Predicted against measured speed, over models, budgets and storage speeds."""
    _pass_on("predict", "bench.prediction", "predict_command", context.args)


@app.command("train-pair", context_settings=_PASSED_ON)
def train_pair(context: typer.Context) -> None:
    """Train the embedded pair from Python source found on this machine."""
    _pass_on("train-pair", "bench.train_pair", "main", context.args)


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _pass_on(name: str, module: str, function: str, argv: Sequence[str]) -> None:
    """Run a command that lives in a module of its own, imported only now (it needs torch)."""
    one = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    one.command()(with_debug(getattr(importlib.import_module(module), function)))
    raise typer.Exit(run_app(one, f"specdec-bench {name}", argv))


def _check_choices(
    output: str,
    peer: str | None,
    load: LoadOptions,
    enforce: bool,
    file: Path | None,
    log: Path | None,
) -> None:
    check_output(output)
    if peer is not None:
        _check_peer(peer, load)
    if load.memory_budget == "auto" and (peer is not None or enforce):
        raise UsageMistake("--peer and --enforce need a --memory-budget with a size, e.g. 3.5GiB")
    check_writable("--output-file", file)
    check_writable("--log", log)


def _check_peer(name: str, load: LoadOptions) -> None:
    from bench.peers import PEERS, Weights, why_not
    from specdec.models import resolve_model

    if name not in PEERS:
        raise UsageMistake(f"--peer {name!r} is not known; choose one of {', '.join(PEERS)}")
    draft = None if load.draft_model is None else resolve_model(load.draft_model)
    problem = why_not(PEERS[name], Weights.of(resolve_model(load.model), draft))
    if problem is not None:
        raise UsageMistake(f"--peer {name} cannot run: {problem}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    # `specdec demo` becomes this program, and keeps its name.
    return run_app(
        app, os.environ.pop(COMMAND_NAME, "specdec-bench"), sys.argv[1:] if argv is None else argv
    )


if __name__ == "__main__":
    sys.exit(main())
