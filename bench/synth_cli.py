"""`specdec-bench synth`: grow a small checkpoint to a large model's size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bench.shapes import SHAPES, LlamaShape, SynthError, named_shape, shape_of_size
from offload.errors import SpecdecError
from offload.units import format_bytes, parse_bytes

DEFAULT_SIZE = "6GB"


def synth_command(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the grown checkpoint.")
    ],
    source: Annotated[
        str,
        typer.Option("--from", metavar="DIR", help="Small Llama checkpoint, or pair:target."),
    ] = "pair:target",
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="NAME", help=f"Shape to take: {', '.join(SHAPES)}."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help=f"Size of the weights, for example 6GB; adjusts the nearest shape, or the one "
            f"of --like. Default {DEFAULT_SIZE} without --like.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Vocabulary; by default the shape's own."),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="bf16|fp32", help="Type of the weights.")] = "bf16",
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint in DIR.")] = False,
) -> None:
    """Grow a small model to a large one's bytes, FLOPs and shapes; its text stays the same."""
    try:
        _synth(out, source, like, size, vocab_size, dtype, seed, force)
    except (SpecdecError, FileNotFoundError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _synth(
    out: Path,
    source: str,
    like: str | None,
    size: str | None,
    vocab_size: int | None,
    dtype: str,
    seed: int,
    force: bool,
) -> None:
    if dtype not in ("bf16", "fp32"):
        raise SynthError(f"unknown dtype {dtype!r}; known: bf16, fp32")
    if like is None and size is None:
        size = DEFAULT_SIZE
    base = named_shape(like) if like else None
    n_bytes = parse_bytes(size) if size else None

    # Imports torch, which takes seconds: a mistyped option should not have to wait for it.
    from bench.source_model import SourceModel
    from bench.synth import grow
    from specdec.pair import resolve_model_dir

    folder = resolve_model_dir(source)
    with SourceModel(folder) as model:
        shape = _choose_shape(model.shape, base, n_bytes, vocab_size, 2 if dtype == "bf16" else 4)
    with _ProgressBar(out.name) as bar:
        report = grow(
            folder,
            out,
            shape,
            vocab_size=vocab_size,
            dtype=dtype,
            seed=seed,
            force=force,
            source_name=source,
            progress=bar.update,
        )
    typer.echo(
        f"{report.folder}: {report.shape.n_layers} layers, "
        f"{report.n_parameters / 1e9:.2f} G weights, {format_bytes(report.n_bytes)} in "
        f"{report.n_shards} file(s), grown from {source}"
    )


def _choose_shape(
    source: LlamaShape,
    base: LlamaShape | None,
    n_bytes: int | None,
    vocab_size: int | None,
    bytes_per_weight: int,
) -> LlamaShape:
    """The shape named, or adjusted to a size; tied only if the source is, so sizes are right."""
    if n_bytes is None:
        assert base is not None
        return base
    known = [base] if base else list(SHAPES.values())
    candidates = [replace(shape, tied=shape.tied and source.tied) for shape in known]
    return shape_of_size(
        n_bytes,
        bytes_per_weight,
        candidates,
        vocab_size=vocab_size,
        min_layers=source.n_layers,
        min_intermediate_size=source.intermediate_size,
    )


class _ProgressBar:
    """A rich progress bar of bytes on stderr."""

    def __init__(self, label: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

        self._progress = Progress(
            "[progress.description]{task.description}",
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(label, total=None)

    def update(self, n_bytes: int, total_bytes: int) -> None:
        # Begins with the first bytes, so that a refusal is not printed below an empty bar.
        self._progress.start()
        self._progress.update(self._task, completed=n_bytes, total=total_bytes)

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
