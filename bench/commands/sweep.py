"""`specdec-bench sweep`: speed against budget, storage speed and tree size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench import options
from bench.options import UsageMistake
from bench.prompts.workloads import BUILT_IN, describe_left_out, read_prompts, spread
from offload.budget import BudgetExceeded
from offload.units import format_bytes
from specdec.cli.groups import LOAD, Load, Sampling, parse_num_draft_tokens

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

STORAGE_SPEEDS = {"sd-card": 90.0, "sata": 500.0, "ufs-3.1": 1500.0, "full": None}
"""Named limits of reads in MB/s."""

Budgets = Annotated[
    str,
    typer.Option(
        "--budgets",
        metavar="SIZE,...|auto",
        help="Memory budgets; auto goes from the smallest that works to all in memory.",
    ),
]
Storage = Annotated[
    str,
    typer.Option(
        "--storage",
        metavar="NAME|MBPS,...",
        help="Storage speeds: MB/s, or " + ", ".join(STORAGE_SPEEDS) + ". Below full needs root.",
    ),
]
Trees = Annotated[
    str,
    typer.Option(
        "--trees",
        metavar="N|auto,...",
        help="Draft tokens per pass; 0 is plain decoding, auto chooses.",
    ),
]
TimeLimit = Annotated[
    float, typer.Option("--time-limit", min=1, help="Seconds of decoding for each setting.")
]
Prediction = Annotated[
    bool,
    typer.Option(
        "--prediction",
        help="Compare the plan's seconds per pass and tokens per second with measured ones.",
    ),
]
Reference = Annotated[
    Path | None,
    typer.Option(
        "--reference",
        help="Report of `speedup` whose sequences these must equal.",
        show_default="the first setting's",
    ),
]
Lines = Annotated[
    Path,
    typer.Option("-o", "--output-file", help="JSON Lines; its settings are not measured again."),
]


def sweep_command(
    context: typer.Context,
    load: Load,
    sampling: Sampling,
    output_file: Lines,
    budgets: Budgets = "auto",
    storage: Storage = "full",
    trees: Trees = "0,auto",
    prompts: options.Prompts = BUILT_IN,
    n_prompts: options.SpreadPrompts = 4,
    max_tokens: options.MaxTokens = 32,
    time_limit: TimeLimit = 120.0,
    enforce: options.EnforceAlways = True,
    ignore_eos: options.IgnoreEos = False,
    prediction: Prediction = False,
    reference: Reference = None,
) -> None:
    """Measure budgets x storage speeds x tree sizes; the same command resumes."""
    from bench.checks.equal_outputs import check_equal_outputs
    from bench.peers.registry import Weights
    from bench.peers.runs import settings_for
    from bench.peers.sweep import (
        Sweep,
        all_settings,
        prepare_file,
        recorded_budgets,
        reference_outputs,
        run_sweep,
    )
    from bench.process.provenance import collect
    from bench.process.results import SWEEP, read_results
    from bench.prompts.lengths import fitting
    from bench.report.tables import tables
    from bench.table import text_of

    options.check_writable("--output-file", output_file)
    options.check_lossless(load, "sweep")
    options.refuse_one_budget(load)
    speeds, sizes = parse_speeds(storage), parse_trees(trees)
    amounts = parse_budgets(budgets)
    if not enforce and any(speed is not None for speed in speeds):
        raise UsageMistake("--storage below full needs the cgroup that --no-enforce leaves out")
    if load.draft_model is None and any(size != 0 for size in sizes):
        raise UsageMistake("--trees above 0 need a draft model: give -md, or --trees 0")
    prepare_file(output_file)
    outputs = None if reference is None else reference_outputs(reference)
    given = read_prompts(prompts)
    weights = Weights.named(*options.model_names(load))
    keywords = {k: v for k, v in load.keywords(LOAD).items() if k != "num_draft_tokens"}
    base = settings_for(
        keywords,
        memory_bytes=0,
        n_tokens=max_tokens,
        seconds=time_limit,
        enforce=enforce,
        ignore_eos=ignore_eos,
        sampling={"seed": 0, **sampling} if sampling else {},
        predict=prediction,
    )
    fit, n_too_long = fitting(given, weights.model, load.ctx_size, max_tokens)
    if n_too_long:
        typer.echo(describe_left_out(n_too_long, max_tokens), err=True)
    sweep = Sweep(weights, tuple(spread(fit, n_prompts)), base, reference=outputs)
    if amounts:
        refuse_small_budget(load, min(amounts), sizes)
    else:
        amounts = recorded_budgets(output_file, sweep) or find_budgets(load)
        sweep = replace(sweep, auto_budgets=tuple(amounts))
    settings = all_settings(amounts, speeds, sizes)
    provenance = collect(["specdec-bench", *context.obj.argv], weights.model)
    measured: list[dict[str, Any]] = []
    with _progress(len(settings)) as advance:
        for setting, line in zip(
            settings, run_sweep(sweep, settings, output_file, provenance), strict=True
        ):
            advance(describe(setting, line), line is not None)
            measured += line.get("records", ()) if line else ()
    typer.echo(text_of(tables(SWEEP, read_results(output_file).value)))
    check_equal_outputs(measured)


def parse_speeds(text: str) -> list[float | None]:
    """Return speeds in MB/s; None is the storage's own speed."""
    speeds: list[float | None] = []
    for name in text.split(","):
        if name in STORAGE_SPEEDS:
            speeds.append(STORAGE_SPEEDS[name])
            continue
        try:
            speeds.append(float(name))
        except ValueError:
            speeds.append(0.0)
        if not 0 < (speeds[-1] or 0) < float("inf"):
            raise UsageMistake(
                f"--storage {name!r} is no speed: give MB/s, or one of {', '.join(STORAGE_SPEEDS)}"
            )
    return list(dict.fromkeys(speeds))


def parse_trees(text: str) -> list[int | None]:
    """Return draft tokens per pass; None is auto."""
    return list(dict.fromkeys(parse_num_draft_tokens(item, "--trees") for item in text.split(",")))


def parse_budgets(text: str) -> list[int]:
    """Return bytes, in the order given; empty for "auto"."""
    if text == "auto":
        return []
    amounts = list(dict.fromkeys(options.parse_size("--budgets", n) for n in text.split(",")))
    if 0 in amounts:
        raise UsageMistake(f"--budgets {text}: a budget of 0 bytes holds nothing; try 2GiB")
    return amounts


def find_budgets(load: Load) -> list[int]:
    """Return the budgets in bytes that the planner finds for the models on this machine."""
    from bench.peers.sweep import auto_budgets
    from specdec.planning.plan import plan_run

    keywords = {name: v for name, v in load.keywords(LOAD).items() if name != "memory_budget"}
    return auto_budgets(lambda budget: plan_run(memory_budget=budget, **keywords))


def refuse_small_budget(load: Load, n_bytes: int, trees: list[int | None]) -> None:
    """Raise UsageMistake for a budget that a run with one of these trees would refuse."""
    from specdec.planning.plan import plan_run

    for n_draft_tokens in trees:
        keywords = {**load.keywords(LOAD), "memory_budget": n_bytes}
        if n_draft_tokens == 0:
            keywords |= {"draft_model": None, "spec_type": "none", "num_draft_tokens": None}
        else:
            keywords["num_draft_tokens"] = n_draft_tokens
        try:
            plan_run(**keywords)
        except BudgetExceeded as error:
            raise UsageMistake(f"--budgets {format_bytes(n_bytes)}: {error}") from error


def describe(setting: Any, line: dict[str, Any] | None) -> str:
    """Return a line for the terminal: the setting and its result."""
    speed, tree = setting.storage_mbps, setting.num_draft_tokens
    text = format_bytes(setting.memory_budget_bytes)
    text += ", full speed" if speed is None else f", {speed:g} MB/s"
    text += {None: ", auto tree", 0: ", plain"}.get(tree, f", tree of {tree}")
    if line is None:
        return text + ": already there"
    if line["tokens_per_second"] is None:
        return f"{text}: {line['exit']} ({line['reason']})"
    return f"{text}: {line['tokens_per_second']:.2f} tok/s ({line['exit']})"


@contextmanager
def _progress(n_settings: int) -> Iterator[Any]:
    """Show a bar with the time left, and a line for each setting, on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("sweep"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("time left"),
        # The mean of all settings so far: they differ by far more than a moving mean allows for.
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, speed_estimate_period=24 * 3600, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("sweep", total=n_settings)

        def advance(line: str, is_measured: bool) -> None:
            console.print(line, markup=False, highlight=False)
            count_setting(bar, task, is_measured)

        yield advance


def count_setting(bar: Progress, task: TaskID, is_measured: bool) -> None:
    """Advance the bar; a setting that was in the file must not change the estimated time left."""
    if is_measured:
        bar.advance(task)
    else:
        bar.reset(task, completed=int(bar.tasks[task].completed) + 1)
