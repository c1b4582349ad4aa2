"""`specdec check`: whether a target and a draft go together, and which draft is fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli import options
from specdec.cli.enforce import run_benchmark
from specdec.cli.groups import LoadEachDraft, Sampling, one_draft, with_options
from specdec.cli.output import write_json, write_text
from specdec.cli.progress import waiting
from specdec.models.drafts import AUTO_DRAFT
from specdec.run_options import RunOptions

Rank = Annotated[
    bool,
    typer.Option(
        "--rank",
        help="Measure which of several drafts (-md A -md B) is best for a run with these options.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help="For --rank: JSON lines with `prompt`, or `turns` of which the first is used.",
        show_default=False,
    ),
]
NPrompts = Annotated[
    int,
    typer.Option("--n-prompts", min=1, help="For --rank: use so many, by category in turn."),
]


@with_options
def check(
    context: typer.Context,
    load: LoadEachDraft,
    sampling: Sampling,
    rank: Rank = False,
    prompts: Prompts = None,
    n_prompts: NPrompts = 8,
    max_tokens: options.MaxTokens = 64,
    enforce: options.Enforce = False,
    json: options.Json = False,
) -> None:
    """Check that a draft has the target's vocabulary, or rank several drafts."""
    if not rank:
        if prompts is not None:
            raise options.OptionError("--prompts is for measuring drafts: add --rank")
        _compare(load, json)
        return
    # Measuring belongs to the benchmark, as the demonstration does.
    run_benchmark("bench.rank", _words(context))


def _words(context: typer.Context) -> list[str]:
    """Return all options of this call, for the benchmark reads neither variables nor the
    settings file; the typed words may have `--config FILE` in front."""
    words: list[str] = []
    for param in context.command.params:
        value = context.params[str(param.name)]
        source = context.get_parameter_source(str(param.name))
        is_default = source is None or source.name == "DEFAULT"
        if is_default or value is False or param.name == "rank":
            continue
        option = max(param.opts, key=len)
        values = value if isinstance(value, (list, tuple)) else [value]
        words += [option] if value is True else [f"{option}={each}" for each in values]
    return words


def _compare(named: list[RunOptions], json: bool) -> None:
    model, draft = named[0].model, one_draft([str(item.draft_model or "") for item in named])
    if not draft:
        raise options.OptionError("no draft model was named: use -md (--draft-model)")
    if draft == AUTO_DRAFT:
        raise options.OptionError(
            f"-md auto is chosen when a run is planned: specdec plan -m {model} -md auto says "
            "which draft and why"
        )
    with waiting("reading both models"):
        from specdec.models.opened import compare_draft
        from specdec.text.vocabulary import Compatibility

        result = compare_draft(model, draft)
    if json:
        write_json(result.to_dict())
    else:
        write_text("\n".join(result.lines()) + "\n")
    if isinstance(result, Compatibility):
        result.require_compatible()
