"""Generate for a long time inside the memory limit and watch what the process takes.

    python -m bench.checks.soak -m MODEL -md DRAFT --memory-budget 3.5GiB --minutes 60 --output FILE

Prompt after prompt, greedy and sampled in turns, in a process that the kernel limits. Anonymous
memory (what cannot be reclaimed) must not grow after the first minute, and nothing may be written
to storage: swapping, or a file that quietly grows, would show there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.prompts.workloads import BUILT_IN, Prompt, read_prompts
from offload.process.memory import process_memory
from offload.units import format_bytes
from specdec.cli.errors import run_app

SETTLED_SECONDS = 60.0
SAMPLE_TOKENS = 64

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def written_bytes() -> int:
    """Bytes that this process had written to storage. Source: proc_pid_io(5), write_bytes."""
    for line in Path("/proc/self/io").read_text().splitlines():
        key, _, value = line.partition(": ")
        if key == "write_bytes":
            return int(value)
    raise OSError("/proc/self/io has no write_bytes")


def generate(llm: Any, prompts: list[Prompt], seconds: float) -> Iterator[dict[str, Any]]:
    """One record after each generation, until the time is over."""
    started, n_tokens, number = time.monotonic(), 0, 0
    while (elapsed := time.monotonic() - started) < seconds or not number:
        prompt = prompts[number % len(prompts)]
        sampling = {"temperature": 0.7, "seed": number} if number % 2 else {}
        result = llm.generate(
            prompt.text, max_tokens=SAMPLE_TOKENS, speculative=number % 4 < 3, **sampling
        )
        n_tokens, number = n_tokens + len(result.token_ids), number + 1
        elapsed = time.monotonic() - started
        memory = process_memory()
        yield {
            "seconds": elapsed,
            "generations": number,
            "tokens": n_tokens,
            "anonymous_bytes": memory.anonymous_bytes + memory.swap_bytes,
        }


def summarise(records: list[dict[str, Any]], n_written: int) -> dict[str, Any]:
    """Growth of anonymous memory since the first record after a minute."""
    settled = [r for r in records if r["seconds"] >= SETTLED_SECONDS] or records[-1:]
    first, last = settled[0]["anonymous_bytes"], settled[-1]["anonymous_bytes"]
    return {
        **{key: records[-1][key] for key in ("seconds", "generations", "tokens")},
        "settled_anonymous_bytes": first,
        "last_anonymous_bytes": last,
        "largest_anonymous_bytes": max(r["anonymous_bytes"] for r in settled),
        "grown_bytes": last - first,
        "written_bytes": n_written,
    }


def soak(load: dict[str, Any], minutes: float) -> dict[str, Any]:
    """Load, generate and watch, in this process."""
    import specdec

    with specdec.load(**load) as llm:
        before = written_bytes()
        records = []
        for record in generate(llm, read_prompts(BUILT_IN), 60 * minutes):
            records.append(record)
            print(
                f"{record['seconds'] / 60:.1f} min: {record['tokens']} tokens, "
                f"{format_bytes(record['anonymous_bytes'])} anonymous",
                file=sys.stderr,
            )
        return {**summarise(records, written_bytes() - before), "records": records}


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    memory_budget: Annotated[str, typer.Option("--memory-budget")],
    output: Annotated[Path, typer.Option("--output", help="JSON report.")],
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size")] = 1024,
    minutes: Annotated[float, typer.Option("--minutes", min=0.0)] = 60.0,
) -> None:
    """Generate for a long time inside a memory cgroup of the budget."""
    from specdec.cli.enforce import enforced_bytes, run_enforced

    if enforced_bytes() is None:
        raise typer.Exit(run_enforced("bench.checks.soak", sys.argv[1:], memory_budget))
    load = {
        "model": model,
        "draft_model": draft_model,
        "memory_budget": memory_budget,
        "ctx_size": ctx_size,
    }
    result = soak(load, minutes)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    grown, written = format_bytes(max(0, result["grown_bytes"])), result["written_bytes"]
    typer.echo(f"{result['tokens']} tokens; grown by {grown}; {written} bytes written")


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.soak", sys.argv[1:]))
