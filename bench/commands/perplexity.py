"""`specdec-bench perplexity`: perplexity of a text with each number format of the KV cache."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from backends.contract.source import CACHE_TYPES
from bench import options
from bench.options import UsageMistake
from bench.table import Columns, Table, cells, headings, text_of
from specdec.cli.groups import LOAD, Load

_COLUMNS: Columns = (
    ("KV bytes/token", "kv_bytes_per_token", "{:.0f}", 1.0),
    ("perplexity", "perplexity", "{:.4f}", 1.0),
    ("+-", "perplexity_error", "{:.4f}", 1.0),
    ("change %", "perplexity_change", "{:+.4f}", 0.01),
    ("+-", "perplexity_change_error", "{:.4f}", 0.01),
    ("same likeliest token %", "same_likeliest_fraction", "{:.2f}", 0.01),
)
_WINDOW = 512


def perplexity_command(
    context: typer.Context,
    load: Load,
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="UTF-8 text to score.")],
    cache_types: Annotated[
        str,
        typer.Option(
            "--cache-types",
            metavar="TYPE,...",
            help="Formats of keys and values, or KEYS/VALUES; own: the model's. The others are "
            "compared with the first.",
        ),
    ] = "own,q8_0,fp8",
    max_windows: Annotated[
        int | None,
        typer.Option("--max-windows", min=1, help="Score the first so many windows of -c tokens."),
    ] = None,
    output: options.Output = "table",
    output_file: options.OutputFile = None,
) -> None:
    """Measure the perplexity of a text with each number format of the KV cache."""
    from bench.decode.perplexity import PerplexitySpec, measure
    from bench.process.provenance import collect
    from bench.process.results import write_json
    from specdec.cli.libraries import quiet_libraries
    from specdec.models.names import resolve_model

    types = _types(cache_types)
    options.check_output(output)
    options.check_writable("--output-file", output_file)
    content = _content(text)
    keywords = {"ctx_size": _WINDOW, **load.keywords(LOAD)}
    keywords["ctx_size"] = keywords["ctx_size"] or _WINDOW
    keywords["model"] = str(resolve_model(keywords["model"]))
    keywords["draft_model"] = None
    quiet_libraries()  # transformers warns about a long text
    provenance = collect(["specdec-bench", *context.obj.argv], Path(keywords["model"]))
    rows = measure(PerplexitySpec(keywords, content, types, max_windows), sys.stderr)
    window = keywords["ctx_size"]
    result = {"text": str(text), "window": window, "rows": rows, "provenance": provenance}
    if output_file is not None:
        write_json(result, output_file)
    if output == "json":
        write_json(result, None)
        return
    about = (f"{rows[0]['n_tokens']} tokens of {text}: the second half of each window of {window}",)
    named = tuple((_title(row), *cells(row, _COLUMNS)) for row in rows)
    typer.echo(text_of([Table("Perplexity", ("KV cache", *headings(_COLUMNS)), named, about)]))


def _types(names: str) -> list[tuple[str, str | None, str | None]]:
    from bench.decode.perplexity import OWN

    types = []
    for name in names.split(","):
        keys, _, values = name.partition("/")
        pair = (keys, values or keys)
        if not set(pair) <= {OWN, *CACHE_TYPES}:
            raise UsageMistake(
                f"--cache-types {names}: {name!r} is none of {', '.join((OWN, *CACHE_TYPES))}"
            )
        keys_type, values_type = (None if x == OWN else x for x in pair)
        types.append((name, keys_type, values_type))
    return types


def _content(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageMistake(f"--text {text}: {reason}") from None


def _title(row: dict[str, Any]) -> str:
    """Return the formats of the keys and the values."""
    keys, values = row["cache_type_k"], row["cache_type_v"]
    return keys if keys == values else f"{keys}/{values}"
