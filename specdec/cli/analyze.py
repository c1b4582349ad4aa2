"""`specdec analyze`: the roofline of a model from its header."""

from __future__ import annotations

from typing import Annotated

import typer

from specdec.cli import options
from specdec.cli.output import say, write_json, write_text
from specdec.models.names import check_local_name

Phase = Annotated[
    str | None,
    typer.Option(
        "--phase",
        metavar="decode|verify|prefill",
        help="Show one kind of pass.",
        show_default="all three",
    ),
]
PassTokens = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--n-tokens",
        min=1,
        help="Tokens of the pass: draft tokens to verify, or of the prompt.",
        show_default="16 to verify; the context",
    ),
]


def analyze(
    model: options.Model,
    ctx_size: options.CtxSize = None,
    phase: Phase = None,
    n_tokens: PassTokens = None,
    on: options.OnDevice = None,
    memory_budget: options.MemoryBudget = "auto",
    threads: options.Threads = None,
    cache_type_k: options.CacheTypeK = None,
    cache_type_v: options.CacheTypeV = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show what a pass multiplies and moves, what binds it, and how many tokens are free."""
    check_local_name(model)
    from specdec.analysis.analyze import analyze as analyze_model

    result = analyze_model(
        model,
        phase=phase,
        n_tokens=n_tokens,
        on=on,
        ctx_size=ctx_size,
        memory_budget=memory_budget,
        threads=threads,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
    )
    if ctx_size is not None and result.context < ctx_size:
        say(f"note: --ctx-size {ctx_size} is cut to the model's {result.context}")
    if json:
        write_json(result.to_dict())
    else:
        write_text(result.text())
