"""`specdec models`: what is on this machine already, and which of it go together."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from offload.errors import SpecdecError
from offload.units import format_bytes
from specdec.cli import options
from specdec.cli.output import say, write_json, write_text
from specdec.models.found import FoundModel, found_models

Folder = Annotated[
    Path | None,
    typer.Argument(help="A folder of your own to look into, too.", show_default=False),
]
Fits = Annotated[
    str | None,
    typer.Option("--fits", metavar="TARGET", help="Only what may draft for this model."),
]


def models(
    folder: Folder = None,
    fits: Fits = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List the models on this machine: of the hub's cache, Ollama, LM Studio and llama.cpp."""
    if folder is not None and not folder.is_dir():
        raise options.OptionError(f"{folder} is no folder: name one that holds models")
    found = found_models(folder)
    if fits is not None:
        found = [one for one in found if _may_draft(one, fits)]
    if json:
        write_json({"models": [asdict(one) for one in found]})
        return
    width = max((len(one.name) for one in found), default=0)
    for one in found:
        size = format_bytes(one.n_bytes)
        write_text(f"{one.name:{width}}  {size:>11}  {one.kind}, {one.keeper}\n")
    if not found:
        write_text(
            "none; -m takes a directory, a GGUF file or a hub id, and pair:target is built in\n"
        )


def _may_draft(one: FoundModel, target: str) -> bool:
    """Whether it is another model with the target's vocabulary; one that cannot be read is told."""
    from specdec.models.names import resolve_model
    from specdec.models.opened import read_vocabulary
    from specdec.text.vocabulary import compare_vocabularies

    wanted = read_vocabulary(target)
    try:
        if resolve_model(one.name) == resolve_model(target):
            return False
        return compare_vocabularies(wanted, read_vocabulary(one.name)).problem is None
    except SpecdecError as error:
        say(f"note: {one.name} is left out: {error}")
        return False
