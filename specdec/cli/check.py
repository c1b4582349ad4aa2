"""`specdec check`: do a target and a draft go together, and which draft serves best?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bench.prompts.workloads import read_prompts, spread
from bench.rank.ranking import measure_in_child, rank_drafts
from specdec.cli import options
from specdec.cli.groups import LoadOptions, SamplingOptions
from specdec.cli.output import write_json, write_text
from specdec.cli.signature import with_options
from specdec.models.names import check_local_draft, check_local_name, is_self_draft

Rank = Annotated[
    bool,
    typer.Option(
        "--rank",
        help="Measure which of several drafts (-md A -md B) serves best; the options of a run "
        "are those that it measures with.",
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
    typer.Option("--n-prompts", min=1, help="For --rank: use so many, of each category in turn."),
]


@with_options
def check(
    load: LoadOptions,
    sampling: SamplingOptions,
    rank: Rank = False,
    prompts: Prompts = None,
    n_prompts: NPrompts = 8,
    max_tokens: options.MaxTokens = 64,
    enforce: options.Enforce = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Do these two go together? Compares their vocabularies token by token, or ranks drafts."""
    if not rank:
        if prompts is not None:
            raise options.OptionError("--prompts is for measuring drafts: add --rank")
        _compare(load, json)
        return
    if prompts is None:
        raise options.OptionError("--rank measures on prompts of yours: add --prompts FILE")
    _check_drafts(load)
    texts = [prompt.text for prompt in spread(read_prompts(prompts), n_prompts)]
    ranking = rank_drafts(
        load.model,
        load.draft_models or (),
        texts,
        partial(measure_in_child, enforce=enforce),
        max_tokens=max_tokens,
        load_options=load.keywords_with(None),
        sampling=sampling.as_keywords(),
    )
    if json:
        write_json(ranking.to_dict())
    else:
        write_text("\n".join(ranking.lines()) + "\n")


def _compare(load: LoadOptions, json: bool) -> None:
    if load.draft_model is None:
        raise options.OptionError("no draft model was named: use -md (--draft-model)")
    from specdec.models.opened import compare_models

    draft = load.model if is_self_draft(load.draft_model) else load.draft_model
    result = compare_models(load.model, draft)
    if json:
        write_json(result.to_dict())
    else:
        write_text("\n".join(result.lines()) + "\n")
    result.require_compatible()


def _check_drafts(load: LoadOptions) -> None:
    """Raise for names that lead nowhere, and where no draft model would be used."""
    if not load.draft_models:
        raise options.OptionError(
            "no draft model was named: use -md (--draft-model), once for each"
        )
    check_local_name(load.model)
    for name in load.draft_models:
        check_local_draft(name)
    keywords = load.keywords_with(load.draft_models[0])
    spec_type = keywords["spec_type"]
    if keywords["num_draft_tokens"] == 0 or (spec_type is not None and "draft" not in spec_type):
        raise options.OptionError(
            "--rank compares draft models, which --spec-type or --num-draft-tokens switches off: "
            "leave them out"
        )
