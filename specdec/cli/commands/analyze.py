"""`specdec analyze`: the roofline of a model from its header."""

from __future__ import annotations

from typing import Annotated

import typer

from specdec.cli import options
from specdec.cli.groups import Roofline, with_options
from specdec.cli.output import say, write_json, write_text
from specdec.cli.progress import waiting
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


@with_options
def analyze(
    load: Roofline,
    phase: Phase = None,
    n_tokens: PassTokens = None,
    on: options.OnDevice = None,
    json: options.Json = False,
) -> None:
    """Show a pass's FLOPs and bytes, its bottleneck, and how many more tokens cost no time."""
    check_local_name(load.model)
    with waiting(f"analyzing {load.model}"):
        from specdec.analysis.analyze import analyze as analyze_model

        result = analyze_model(**load.keywords(), phase=phase, n_tokens=n_tokens, on=on)
    if load.ctx_size is not None and result.context < load.ctx_size:
        say(f"note: --ctx-size {load.ctx_size} is cut to the model's {result.context}")
    if json:
        write_json(result.to_dict())
    else:
        write_text(result.text())
