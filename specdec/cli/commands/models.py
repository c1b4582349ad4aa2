"""`specdec models`, `pull` and `rm`: list, download and remove local models."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from offload.units import format_bytes
from specdec.cli import options
from specdec.cli.output import write_json, write_text
from specdec.models.local_models import local_models

Folder = Annotated[
    Path | None,
    typer.Argument(help="Another folder to search.", show_default=False),
]
Fits = Annotated[
    str | None,
    typer.Option("--fits", metavar="TARGET", help="Only models that can draft for this one."),
]
_NO_MODELS = (
    "no models here yet: -m takes a folder, a GGUF file or a hub id, and smollm2 is a small model "
    "to try"
)


def models(
    folder: Folder = None,
    fits: Fits = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List the models on this machine: in the hub's cache, Ollama, LM Studio and llama.cpp."""
    if folder is not None and not folder.is_dir():
        raise options.OptionError(f"{folder} is no folder: name one that holds models")
    local = local_models(folder)
    none_here = _NO_MODELS
    if fits is not None:
        from specdec.models.drafts import drafts_for, no_draft_for

        compared, local = local, drafts_for(fits, local)
        none_here = no_draft_for(fits, compared)
    if json:
        write_json({"models": [asdict(item) for item in local]})
        return
    width = max((len(item.name) for item in local), default=0)
    for item in local:
        size = format_bytes(item.n_bytes)
        write_text(f"{item.name:{width}}  {size:>11}  {item.kind}, {item.keeper}\n")
    if not local:
        write_text(f"{none_here}\n")


def pull(
    model: Annotated[str, typer.Argument(help="A hub id: user/repo, or user/repo:Q4_K_M of GGUF.")],
    debug: options.Debug = False,
) -> None:
    """Download a model from the Hugging Face hub into its cache, where -m finds it."""
    from specdec.models.names import is_hub_id, resolve_model

    if not is_hub_id(model):
        path = resolve_model(model)  # raises ModelNotFound for an unknown name
        raise options.OptionError(f"{model} is on this disk already: {path}")
    path = resolve_model(model)
    write_text(f"{path}\n")


def rm(
    model: Annotated[str, typer.Argument(help="A hub id, as `specdec models` lists it.")],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    debug: options.Debug = False,
) -> None:
    """Remove a model from the Hugging Face cache; models of other programs are left alone."""
    from specdec.models.cached import cached_model

    cached = cached_model(model)
    size = format_bytes(cached.n_bytes)
    if not yes and not _is_confirmed(f"remove {cached.name} ({size})?"):
        print(f"{cached.name} is kept", file=sys.stderr)
        return
    cached.remove()
    write_text(f"removed {cached.name}: {size} are free again\n")


def _is_confirmed(question: str) -> bool:
    """Ask the user; raise OptionError at the end of input."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort as stop:
        if isinstance(stop.__context__, EOFError):  # else it was Ctrl-C
            raise options.OptionError(
                "there is no terminal to ask at: pass --yes to remove it"
            ) from None
        raise
