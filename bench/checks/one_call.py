"""Seconds for many prompts in one call, beside the same prompts one after the other.

    python -m bench.checks.one_call -m MODEL -md pair:draft --memory-budget 3.5GiB

Prompts are computed anew in both, and count. Prints a table, then one JSON line with provenance;
the exit code is 2 if a text differs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.process.provenance import collect
from bench.prompts.workloads import BUILT_IN, read_prompts
from bench.table import Table, text_of
from offload.errors import SpecdecError
from specdec.cli.errors import run_app

if TYPE_CHECKING:
    from specdec.api import LLM

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class DifferentTexts(SpecdecError):
    """A text of one call differs from the text alone."""


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    memory_budget: Annotated[str | None, typer.Option("--memory-budget")] = None,
    prompts: Annotated[
        Path, typer.Option("--prompts", help="JSON lines with `prompt`.")
    ] = BUILT_IN,
    n_prompts: Annotated[int, typer.Option("--n-prompts")] = 16,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", help="Join prompts up to this length; 0: as they are.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens")] = 64,
    temperature: Annotated[float, typer.Option("--temperature")] = 0.0,
) -> None:
    """Compare one call with many prompts with many calls."""
    import specdec

    load: dict[str, Any] = {"model": model, "draft_model": draft_model}
    load |= {"memory_budget": memory_budget} if memory_budget else {}
    options = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True}
    with specdec.load(**load) as llm:
        ids = [llm.tokenizer.encode(prompt.text) for prompt in read_prompts(prompts, n_prompts)]
        if prompt_tokens:
            ids = [_joined(ids, first, prompt_tokens) for first in range(len(ids))]
        result = measure(llm, ids, options)
        result["kv_tokens"] = llm.plan.kv_tokens
    typer.echo(text_of([table_of(result)]))
    typer.echo(json.dumps({**result, "load": load, "sampling": options, **collect(sys.argv)}))
    if result["n_different"]:
        raise DifferentTexts(
            f"{result['n_different']} of {n_prompts} texts differ from those alone"
        )


def measure(llm: LLM, prompts: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of both ways, and how many texts differ."""
    llm.generate(prompts[0], max_tokens=2, cache_prompt=False)  # warms up
    started = time.monotonic()
    alone = [llm.generate(prompt, cache_prompt=False, **options) for prompt in prompts]
    seconds_alone = time.monotonic() - started
    started = time.monotonic()
    together = llm.generate(prompts, cache_prompt=False, **options)
    seconds_together = time.monotonic() - started
    pairs = zip(alone, together, strict=True)
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "seconds_alone": seconds_alone,
        "seconds_together": seconds_together,
        "ratio": seconds_alone / seconds_together,
        "n_different": sum(first.token_ids != second.token_ids for first, second in pairs),
    }


def table_of(result: dict[str, Any]) -> Table:
    rows = (
        ("one after the other", f"{result['seconds_alone']:.1f}", ""),
        ("in one call", f"{result['seconds_together']:.1f}", f"{result['ratio']:.2f}"),
    )
    return Table("prompts", ("prompts", "seconds", "ratio"), rows)


def _joined(prompts: list[list[int]], first: int, n_tokens: int) -> list[int]:
    """Return the prompts from the first one on, one behind the other, cut to a length."""
    ids: list[int] = []
    for step in range(len(prompts)):
        if len(ids) < n_tokens:
            ids += prompts[(first + step) % len(prompts)]
    return ids[:n_tokens]


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.one_call", sys.argv[1:]))
