"""Memory and speed of a text that is much longer than its context (--context-shift).

    python -m bench.checks.endless_text -m pair:target -md pair:draft --memory-budget 1GiB

The kernel enforces the budget, in a cgroup of this check's own. Prints a row for each part of the
text, then one JSON line with provenance; the exit code is 2 if the text differs from plain
decoding's with the same window, as far as that is compared.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.checks.in_cgroup import INSIDE, run_in_cgroup
from bench.process.provenance import collect
from bench.prompts.workloads import BUILT_IN, read_prompts
from bench.table import Table, text_of
from offload.errors import SpecdecError
from offload.process.memory import process_memory
from offload.units import GIB, parse_bytes
from specdec.cli.errors import run_app

if TYPE_CHECKING:
    from specdec.api import LLM

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class OtherText(SpecdecError):
    """The text differs from plain decoding's."""


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    memory_budget: Annotated[str, typer.Option("--memory-budget")],
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size")] = 2048,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens")] = 100_000,
    num_parts: Annotated[int, typer.Option("--parts", min=1)] = 10,
    num_compared: Annotated[
        int, typer.Option("--compare", help="First tokens that plain decoding computes, too.")
    ] = 8192,
    is_inside: Annotated[bool, typer.Option(INSIDE, hidden=True)] = False,
) -> None:
    """Write one text, and compare its beginning with plain decoding's."""
    if not is_inside:
        options = ["-m", model, "--memory-budget", memory_budget, "-c", str(ctx_size)]
        options += ["-n", str(max_tokens), "--parts", str(num_parts)]
        options += ["--compare", str(num_compared)]
        options += ["-md", draft_model] if draft_model else []
        return run_in_cgroup("bench.checks.endless_text", options, parse_bytes(memory_budget))
    import specdec

    load: dict[str, Any] = {"model": model, "draft_model": draft_model, "ctx_size": ctx_size}
    with specdec.load(**load, memory_budget=memory_budget, context_shift=True) as llm:
        prompt = read_prompts(BUILT_IN, 1)[0].text
        rows, token_ids = measure(llm, prompt, max_tokens, num_parts)
        expected = llm.generate(
            prompt,
            max_tokens=min(num_compared, max_tokens),
            ignore_eos=True,
            speculative=False,
            cache_prompt=False,
        ).token_ids
    typer.echo(text_of([table_of(rows)]))
    typer.echo(json.dumps({"parts": rows, "load": load, **collect(sys.argv)}))
    if token_ids[: len(expected)] != expected:
        raise OtherText("the text differs from plain decoding's with the same window")


def measure(
    llm: LLM, prompt: str, max_tokens: int, num_parts: int
) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """Return a row for each part of a text, and the text's tokens."""
    stream = llm.stream(prompt, max_tokens=max_tokens, ignore_eos=True)
    chunks, rows = iter(stream), []
    for number in range(1, num_parts + 1):
        is_last = number == num_parts
        rows.append(_read(chunks, None if is_last else max_tokens // num_parts))
    return rows, stream.result.token_ids


def _read(chunks: Iterator[Any], num_tokens: int | None) -> dict[str, Any]:
    """Read as many tokens of the text; None: the rest."""
    started, num_read = time.monotonic(), 0
    for chunk in chunks:
        num_read += len(chunk.token_ids)
        if num_tokens is not None and num_read >= num_tokens:
            break
    return {
        "num_tokens": num_read,
        "tokens_per_second": num_read / (time.monotonic() - started),
        "rss_bytes": process_memory().rss_bytes,
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    cells = tuple(
        (
            str(row["num_tokens"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['rss_bytes'] / GIB:.3f}",
        )
        for row in rows
    )
    return Table("one text", ("tokens", "tokens/s", "resident GiB"), cells)


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.endless_text", sys.argv[1:]))
