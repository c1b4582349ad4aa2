"""Options that only the command line has, shared by several commands.

Load options are the fields of run_options.py, sampling options those of sampling/params.py.
"""

from __future__ import annotations

from typing import Annotated

import typer

from offload.errors import SpecdecError
from specdec.cli.libraries import loud_libraries
from specdec.cli.output import SHOWN
from specdec.option import MEMORY
from specdec.sampling.params import UNLIMITED_TOKENS


class OptionError(SpecdecError, ValueError):
    """Invalid value of an option, or invalid combination of options."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # in the command line's words already


Enforce = Annotated[
    bool,
    typer.Option(
        "--enforce",
        help="Run in a memory cgroup of that size, so that the kernel enforces the budget.",
        rich_help_panel=MEMORY,
    ),
]
_NO_LIMIT = (-1, -2)
"""Ways to write no limit: llama.cpp's."""


def as_token_limit(value: int | None) -> int | None:
    """Return the limit that a value of -n means. Raises BadParameter for 0 and below -2."""
    if value in _NO_LIMIT:
        return UNLIMITED_TOKENS
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} is no number of tokens: 1 or more, or -1 for no limit")
    return value


MaxTokens = Annotated[
    int,
    typer.Option(
        "-n",
        "--max-tokens",
        callback=as_token_limit,
        help="Maximum number of tokens to generate; -1: until the text ends or the context is "
        "full.",
    ),
]
OnDevice = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="DEVICE",
        help="Another device: a name (ufs-3.1, sata-ssd, sd-card, gpu-8gb, ...), or a JSON file "
        "that `specdec profile --json` wrote there.",
        show_default="this machine",
    ),
]
System = Annotated[
    str | None,
    typer.Option("--system", help="System message before the conversation.", metavar="TEXT"),
]


def _set_quiet(is_quiet: bool) -> bool:
    SHOWN.metrics = not is_quiet
    return is_quiet


def _set_verbose(is_verbose: bool) -> bool:
    SHOWN.plan = is_verbose
    if is_verbose:
        loud_libraries()
    return is_verbose


Quiet = Annotated[
    bool,
    typer.Option(
        "-q",
        "--quiet",
        callback=_set_quiet,
        expose_value=False,
        help="Print no progress, hints or metrics on stderr; other notes and errors remain.",
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "-v",
        "--verbose",
        callback=_set_verbose,
        expose_value=False,
        help="Also show the plan, and what the libraries log, on stderr.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error (also SPECDEC_DEBUG=1)."),
]
