"""`specdec-bench synth`: grow a small checkpoint to a large model's size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.options import parse_size
from bench.synth.files import refuse_folder, refuse_gguf_file
from bench.synth.recipes import RECIPES
from bench.synth.shapes import HYBRIDS, MIXTURES, SHAPES, Storage, SynthError, named_shape
from bench.synth.sizing import choose_shape
from offload.units import format_bytes
from specdec.cli.progress import loading_progress

DEFAULT_SIZE = "6GB"
MXFP4, GPT_OSS = "mxfp4", "gpt-oss-20b"
"""Number format of a checkpoint that cannot be grown, and the only shape of it."""
# The first is the default.
_DTYPES = {"hf": ("bf16", "fp32", "fp8", "int4", MXFP4), "gguf": tuple(RECIPES)}
_ALIASES = {"f32": "fp32", "fp16": "f16"}


def synth_command(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="PATH", help="Folder of the grown checkpoint, or FILE.gguf."
        ),
    ],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Small Llama, Qwen3-MoE, Qwen3.5 or dense NemotronH: a folder, hub id, or "
            "pair:target.",
        ),
    ] = "pair:target",
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="NAME",
            help=f"Shape to take: {', '.join(SHAPES)}; for mixtures {', '.join(MIXTURES)}; "
            f"for hybrids {', '.join(HYBRIDS)}.",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help=f"Size of the weights, for example 6GB; adjusts the nearest shape, or the one "
            f"of --like. Default {DEFAULT_SIZE} without --like.",
        ),
    ] = None,
    grown_target: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="MODEL",
            help="Grow a draft head (--from HEAD) of pair:target for this target, grown from it.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Vocabulary; by default the shape's own."),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            "--format", metavar="hf|gguf", help="A Hugging Face folder, or one file for llama.cpp."
        ),
    ] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help=f"Type of the weights. hf: {', '.join(_DTYPES['hf'])}; "
            f"gguf: {', '.join(_DTYPES['gguf'])}.",
            show_default="bf16 for hf, q4_0 for gguf",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the checkpoint or GGUF file at PATH.")
    ] = False,
) -> None:
    """Grow a small model to a large one's bytes, FLOPs and shapes; its output stays the same."""
    if grown_target is not None:
        _grow_head(source, grown_target, out)
        return
    dtype = _check_dtype(format, dtype)
    if like is None and size is None:
        size = DEFAULT_SIZE
    base = named_shape(like) if like else None
    n_bytes = parse_size("--size", size) if size else None
    (refuse_gguf_file if format == "gguf" else refuse_folder)(out.expanduser(), force)

    if (format, dtype) == ("hf", MXFP4):
        _draw_gpt_oss(source, out, like, n_bytes, vocab_size, seed, force)
        return

    # Slow imports, after the options were checked.
    from bench.synth.checkpoint import grow
    from bench.synth.gguf import grow_gguf
    from bench.synth.layouts import LAYOUTS
    from bench.synth.source import SourceModel
    from specdec.models.names import resolve_model

    folder = resolve_model(source)
    storage: Storage = RECIPES[dtype] if format == "gguf" else LAYOUTS[dtype]
    small = SourceModel(folder).shape
    shape = choose_shape(small, base, n_bytes, vocab_size, storage)
    with loading_progress(out.name) as progress:
        report = (grow_gguf if format == "gguf" else grow)(
            folder,
            out,
            shape,
            vocab_size=vocab_size,
            dtype=dtype,
            seed=seed,
            force=force,
            source_name=source,
            progress=progress,
        )
    typer.echo(
        f"{report.path}: {report.shape.n_layers} layers, "
        f"{report.n_parameters / 1e9:.2f} G weights, {format_bytes(report.n_bytes)} in "
        f"{report.n_files} file(s), grown from {source}"
    )


def _draw_gpt_oss(
    tokenizer: str,
    out: Path,
    like: str | None,
    n_bytes: int | None,
    vocab_size: int | None,
    seed: int,
    force: bool,
) -> None:
    if like is None or like.lower() != GPT_OSS:
        raise SynthError(f"a checkpoint in {MXFP4} has the shape of gpt-oss: give --like {GPT_OSS}")
    from bench.published.gpt_oss import draw_gpt_oss, shape_of_bytes
    from specdec.models.names import resolve_model

    shape = shape_of_bytes(named_shape(like), n_bytes, vocab_size)
    with loading_progress(out.name) as progress:
        report = draw_gpt_oss(
            resolve_model(tokenizer), out, shape, seed=seed, force=force, progress=progress
        )
    typer.echo(
        f"{report.path}: {report.shape.n_layers} layers, {report.n_parameters / 1e9:.2f} G random "
        f"weights, {format_bytes(report.n_bytes)} in {report.n_files} file(s)"
    )


def _grow_head(head: str, grown_target: str, out: Path) -> None:
    from bench.heads.growth import grow_head
    from specdec.models.names import resolve_model

    small, grown = resolve_model("pair:target"), resolve_model(grown_target)
    n_bytes = grow_head(resolve_model(head), small, grown, out.expanduser())
    typer.echo(f"{out}: {format_bytes(n_bytes)}, grown from {head} for {grown_target}")


def _check_dtype(format: str, dtype: str | None) -> str:
    """Return the canonical name of the type of the weights; by default the format's first."""
    if format not in _DTYPES:
        raise SynthError(f"unknown format {format!r}; known: {', '.join(_DTYPES)}")
    known = _DTYPES[format]
    dtype = known[0] if dtype is None else _ALIASES.get(dtype.lower(), dtype.lower())
    if dtype not in known:
        raise SynthError(f"unknown dtype {dtype!r} for {format}; known: {', '.join(known)}")
    return dtype
