"""`specdec batch`: a file of prompts, and a file of answers that a kill cannot break."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.errors import SpecdecError
from specdec.cli import options
from specdec.cli.groups import BatchLoad, Sampling, with_options
from specdec.cli.loading import open_model, run_again_enforced
from specdec.cli.notes import check_models
from specdec.cli.output import SHOWN, say, say_parts, write_json
from specdec.run_options import RunOptions

if TYPE_CHECKING:
    from specdec.batch.request import Rules
    from specdec.batch.run import Answerer, BatchMetrics
    from specdec.metrics.stats import EngineStats

_TEXT_OPTIONS = (
    "model exact device ctx_size cache_type_k cache_type_v acceptance accept_threshold".split()
)
"""Load options that can change the output: a batch is resumed with the same ones only."""

Source = Annotated[
    Path,
    typer.Argument(
        metavar="IN.jsonl", help="Input file, one request per line.", show_default=False
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output-file",
        metavar="OUT.jsonl",
        help="Output file, one record per line.",
        show_default=False,
    ),
]
Order = Annotated[
    str,
    typer.Option(
        "--order",
        metavar="input|finished",
        help="Order of the records: the input's, or as they were finished.",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="auto|ADDRESS",
        help="Answer on the machines of a Ray cluster; auto: the one that runs here, or one of "
        "this machine alone.",
        show_default=False,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="With --ray: processes with the models.",
        show_default="one a machine",
    ),
]


@with_options
def batch(
    context: typer.Context,
    source: Source,
    load: BatchLoad,
    sampling: Sampling,
    output_file: Output,
    order: Order = "input",
    max_tokens: options.MaxTokens = 512,
    enforce: options.Enforce = False,
    ray: Ray = None,
    workers: Workers = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    json: options.Json = False,
) -> None:
    """Answer a file of prompts. The same command again resumes an interrupted batch."""
    from specdec.batch.journal import ORDERS
    from specdec.batch.lines import BatchError, check_input
    from specdec.batch.request import Rules
    from specdec.batch.run import Batch, BatchMetrics

    if order not in ORDERS:
        raise options.OptionError(f"--order is {order!r}, must be one of {', '.join(ORDERS)}")
    if workers is not None and ray is None:
        raise options.OptionError("--workers needs --ray: it sets the number of workers")
    if enforce and ray is not None:
        raise options.OptionError(
            "--enforce limits this process only, and --ray starts others: leave one out"
        )
    if load.record_traces is not None and ray is not None:
        raise options.OptionError(
            "--record-traces takes one writer, and --ray has many workers: leave one out"
        )
    if enforce:
        run_again_enforced(context, load.memory_budget)
    check_input(source)  # a wrong name is reported before a model is downloaded
    seed = sampling.pop("seed", 0)
    weights = _weights(load, is_elsewhere=ray is not None)
    rules = Rules(str(load.model), {"max_tokens": max_tokens, **sampling}, seed, weights)
    decisive = {name: getattr(load, name) for name in _TEXT_OPTIONS}
    decided = {**decisive, "model": rules.model, "weights": weights, **rules.sampling, "seed": seed}
    work, metrics = Batch(source, output_file, order, decided), BatchMetrics()
    try:
        with _progress(metrics) as report:
            work.run(lambda: _answerer(load, rules, ray, workers), metrics, report)
    except (KeyboardInterrupt, SpecdecError):
        if 0 < metrics.n_answered < metrics.n_lines:
            say(
                f"note: {metrics.n_answered} of {metrics.n_lines} lines are answered; the same "
                "command goes on with the others"
            )
        raise
    _note(metrics, rules.model, output_file)
    if json:
        write_json(_summary(metrics))
    else:
        say_parts(_parts(metrics))
    if metrics.n_errors == metrics.n_lines:
        raise BatchError(f"no line of {source} could be answered: see `error` in {output_file}")


def _weights(load: RunOptions, *, is_elsewhere: bool) -> str | None:
    """Return the weights' fingerprint; None for a hub model that only other machines may have."""
    from specdec.cluster.machines import shared_fingerprint
    from specdec.models.names import resolve_model
    from specdec.models.weight_files import weights_fingerprint

    if is_elsewhere:
        return shared_fingerprint(load.model)
    return weights_fingerprint(resolve_model(load.model))


def _answerer(
    load: RunOptions, rules: Rules, ray: str | None, workers: int | None
) -> AbstractContextManager[Answerer]:
    """Return the answerer: this process, or a Ray cluster."""
    return _local(load, rules) if ray is None else _on_ray(load, rules, ray, workers)


@contextmanager
def _on_ray(
    load: RunOptions, rules: Rules, address: str, n_workers: int | None
) -> Iterator[Answerer]:
    from specdec.batch.ray_cluster import open_cluster

    check_models(load)
    with open_cluster(address, n_workers, load, rules) as answer:
        yield answer


@contextmanager
def _local(load: RunOptions, rules: Rules) -> Iterator[Answerer]:
    from specdec.batch.answering import answer_lines

    with open_model(load, load) as llm:
        yield lambda lines, answered: answer_lines(llm, lines, rules, answered)


@contextmanager
def _progress(metrics: BatchMetrics) -> Iterator[Callable[[], None]]:
    """Show lines done, tokens/s and the time left on a terminal, from the first answer on."""
    if not SHOWN.metrics or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("lines"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None, speed="")

    def show() -> None:
        left = metrics.seconds_left
        if left is None:
            return  # the bar of loading has the terminal
        text = f"{metrics.tokens_per_second:.2f} tok/s, {_duration(left)} left"
        bar.update(task, completed=metrics.n_answered, total=metrics.n_lines, speed=text)
        bar.start()

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def _note(metrics: BatchMetrics, model: str, out: Path) -> None:
    other_models = sorted(metrics.models - {model})
    if other_models:
        names = ", ".join(other_models[:3]) + (", ..." if len(other_models) > 3 else "")
        say(f"note: some lines ask for the model {names}; {model} answered them")
    if 0 < metrics.n_errors < metrics.n_lines:
        say(f"note: {metrics.n_errors} of the lines could not be answered: see `error` in {out}")


def _summary(metrics: BatchMetrics) -> dict[str, Any]:
    result = asdict(metrics)
    del result["models"]
    result["engine"] = None if metrics.engine is None else metrics.engine.to_dict()
    return {**result, "tokens_per_second": metrics.tokens_per_second}


def _parts(metrics: BatchMetrics) -> list[str]:
    before = f" ({metrics.n_before} of them before)" if metrics.n_before else ""
    return [
        f"{metrics.n_answered} lines{before}, {metrics.n_errors} failed",
        f"{metrics.n_generated_tokens} tokens",
        f"{metrics.tokens_per_second:.2f} tok/s",
        _duration(metrics.seconds),
        *_engine_parts(metrics.engine),
    ]


def _engine_parts(stats: EngineStats | None) -> list[str]:
    """Return metrics of the forward passes; empty if there were none."""
    if stats is None or not stats.passes:
        return []
    parts = [
        f"{stats.tokens_per_pass:.2f} new tokens per pass of "
        f"{stats.batch_tokens_per_pass:.1f} tokens",
        f"first token after {stats.mean_time_to_first_token:.1f} s",
    ]
    if stats.preempted:
        parts.append(f"preempted {stats.preempted} times, swapped in {stats.swapped_in} times")
    return parts


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
