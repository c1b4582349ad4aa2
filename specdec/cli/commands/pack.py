"""`specdec pack`: a copy of a checkpoint in three quarters of the bytes, with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli import options
from specdec.cli.output import write_json, write_text
from specdec.cli.progress import loading_progress
from specdec.models.names import check_local_name

Model = Annotated[
    str,
    typer.Option("-m", "--model", help="The checkpoint: a directory or a hub id, in bf16."),
]
Out = Annotated[
    Path,
    typer.Option("-o", "--out", help="Folder for the copy; must not exist yet."),
]
Verify = Annotated[
    bool,
    typer.Option("--verify/--no-verify", help="Read the copy back and compare every weight."),
]


def pack(
    model: Model,
    out: Out,
    verify: Verify = True,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write a packed copy of a checkpoint, which every command accepts in its place."""
    check_local_name(model)
    from specdec.packing.pack import pack as pack_model

    with loading_progress("packing") as progress:
        report = pack_model(model, out, verify=verify, progress=progress)
    if json:
        write_json(report.to_dict())
    else:
        write_text("\n".join(report.lines()) + "\n")
