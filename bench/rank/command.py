"""Command line of `specdec check --rank`: measures which draft serves a target best."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bench.options import SpreadPrompts, UsageMistake
from bench.prompts.workloads import read_prompts, spread
from bench.rank.ranking import measure_in_child, rank_drafts
from specdec.cli import options
from specdec.cli.errors import run_app
from specdec.cli.groups import LOAD, LoadEachDraft, Sampling, with_options
from specdec.cli.output import write_json, write_text
from specdec.models.names import check_local_draft, check_local_name
from specdec.run_options import RunOptions

RankPrompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help="JSON lines with `prompt`, or `turns` of which the first is used.",
        show_default=False,
    ),
]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@with_options
def rank_command(
    load: LoadEachDraft,
    sampling: Sampling,
    prompts: RankPrompts = None,
    n_prompts: SpreadPrompts = 8,
    max_tokens: options.MaxTokens = 64,
    enforce: options.Enforce = False,
    json: options.Json = False,
) -> None:
    """Measure plain decoding, n-grams and each draft model (-md A -md B) on your prompts."""
    if prompts is None:
        raise UsageMistake("--rank measures on prompts of yours: add --prompts FILE")
    _check_drafts(load)
    ranking = rank_drafts(
        str(load[0].model),
        [str(item.draft_model) for item in load],
        [prompt.text for prompt in spread(read_prompts(prompts), n_prompts)],
        partial(measure_in_child, enforce=enforce),
        max_tokens=max_tokens,
        load_options={**load[0].keywords(LOAD), "draft_model": None},
        sampling=sampling,
    )
    if json:
        write_json(ranking.to_dict())
    else:
        write_text("\n".join(ranking.lines()) + "\n")


def _check_drafts(named: list[RunOptions]) -> None:
    """Raise for unknown names, and if no draft model would be used."""
    if named[0].draft_model is None:
        raise UsageMistake("no draft model was named: use -md (--draft-model), once for each")
    check_local_name(named[0].model)
    for item in named:
        check_local_draft(str(item.draft_model))
    if named[0].draft is None:
        raise UsageMistake(
            "--rank compares draft models, which --spec-type or --num-draft-tokens switches off: "
            "leave them out"
        )


def main(argv: Sequence[str] | None, name: str) -> int:
    """Run the command line under this name and return its exit code."""
    return run_app(app, name, sys.argv[1:] if argv is None else argv)
