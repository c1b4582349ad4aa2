"""Memory and speed of one text whose memory budget changes while it is written.

    python -m bench.checks.budget_changes -m MODEL -md pair:draft --budgets 3.5GiB,2GiB,3GiB

The kernel enforces each budget from the step after the change on, in a cgroup of this check's own.
Prints a table, then one JSON line with provenance; the exit code is 2 if the text differs from the
one without changes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.checks.in_cgroup import INSIDE, run_in_cgroup
from bench.process.provenance import collect
from bench.prompts.workloads import BUILT_IN, read_prompts
from bench.table import Table, text_of
from offload.errors import SpecdecError
from offload.process.cgroup_files import write_cgroup
from offload.process.memory import CgroupLocation, memory_cgroups, process_memory
from offload.units import GIB, parse_bytes
from specdec.cli.errors import run_app

if TYPE_CHECKING:
    from specdec.api import LLM

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}


class ChangedText(SpecdecError):
    """The text depends on the changes of the budget."""


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    budgets: Annotated[str, typer.Option("--budgets", help="Sizes, the first one at the start.")],
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    prompts: Annotated[Path, typer.Option("--prompts")] = BUILT_IN,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens")] = 96,
    is_inside: Annotated[bool, typer.Option(INSIDE, hidden=True)] = False,
) -> None:
    """Write one text under changing budgets."""
    sizes = [parse_bytes(size) for size in budgets.split(",")]
    if not is_inside:
        options = ["-m", model, "--budgets", budgets, "--prompts", str(prompts)]
        options += ["-n", str(max_tokens)]
        options += ["-md", draft_model] if draft_model else []
        return run_in_cgroup("bench.checks.budget_changes", options, max(sizes))
    import specdec

    load: dict[str, Any] = {"model": model, "draft_model": draft_model}
    with specdec.load(**load, memory_budget=sizes[0]) as llm:
        prompt = read_prompts(prompts, 1)[0].text
        expected = llm.generate(prompt, max_tokens=max_tokens, ignore_eos=True).token_ids
        rows, token_ids = measure(llm, prompt, sizes, max_tokens)
    typer.echo(text_of([table_of(rows)]))
    typer.echo(json.dumps({"budgets": rows, "load": load, **collect(sys.argv)}))
    if token_ids != expected:
        raise ChangedText("the text differs from the one without changes")


def measure(
    llm: LLM, prompt: str, budgets: list[int], max_tokens: int
) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """Return a row for each budget, and the text's tokens. The kernel takes a lower limit one step
    after the change."""
    stream = llm.stream(prompt, max_tokens=max_tokens, ignore_eos=True, cache_prompt=False)
    chunks, cgroup = iter(stream), min(memory_cgroups(), key=lambda item: item.version)
    _set_limit(cgroup, budgets[0])
    rows = []
    for number, budget in enumerate(budgets):
        if number:
            if budget > budgets[number - 1]:
                _set_limit(cgroup, budget)
            llm.set_memory_budget(budget)
            next(chunks, None)
            _set_limit(cgroup, budget)
        is_last = number == len(budgets) - 1
        rows.append(_read(chunks, budget, None if is_last else max_tokens // len(budgets)))
    return rows, stream.result.token_ids


def _read(chunks: Iterator[Any], budget: int, num_tokens: int | None) -> dict[str, Any]:
    """Read as many tokens of the text; None: the rest."""
    started, n_read, peak = time.monotonic(), 0, 0
    for chunk in chunks:
        n_read += len(chunk.token_ids)
        peak = max(peak, process_memory().rss_bytes)
        if num_tokens is not None and n_read >= num_tokens:
            break
    seconds = time.monotonic() - started
    return {
        "budget_bytes": budget,
        "n_tokens": n_read,
        "tokens_per_second": n_read / seconds,
        "rss_bytes": peak,
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    cells = tuple(
        (
            f"{row['budget_bytes'] / GIB:.2f}",
            f"{row['rss_bytes'] / GIB:.2f}",
            str(row["n_tokens"]),
            f"{row['tokens_per_second']:.2f}",
        )
        for row in rows
    )
    return Table("one text", ("budget GiB", "resident GiB", "tokens", "tokens/s"), cells)


def _set_limit(cgroup: CgroupLocation, n_bytes: int) -> None:
    """Make the kernel enforce a limit; it fails, or kills this process, if more is in use."""
    write_cgroup(cgroup.directory / _LIMIT_FILES[cgroup.version], n_bytes)


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.budget_changes", sys.argv[1:]))
