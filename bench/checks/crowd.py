"""Many texts, long prompts among them, in a budget that the kernel keeps: is anybody killed?

    python -m bench.checks.crowd -m MODEL -md DRAFT --memory-budget 3.5GiB --texts 64 --output FILE

Short prompts decode; long ones come in between and enter beside them. With less room for KV than
all of them need, texts are set aside and come back (--kv-tokens). Layers stay held meanwhile, so
this is where a budget would break. A process that is killed has no report.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import options
from bench.prompts.workloads import BUILT_IN, read_prompts
from offload.process.memory import process_memory
from offload.units import format_bytes
from specdec.cli.errors import run_app

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def prompts_of(llm: Any, n_texts: int, n_long: int, n_tokens: int) -> list[list[int]]:
    """Token ids; the long ones lie evenly among the others."""
    ids = [token for one in read_prompts(BUILT_IN) for token in llm.tokenizer.encode(one.text)]
    ids *= 2 + (n_tokens + 41 * n_texts) // len(ids)
    every = max(1, n_texts // n_long) if n_long else n_texts + 1
    long = set(range(every - 1, n_texts, every)[:n_long])
    return [ids[41 * i : 41 * i + (n_tokens if i in long else 40)] for i in range(n_texts)]


def crowd(
    load: dict[str, Any], n_texts: int, n_long: int, prompt_tokens: int, max_tokens: int
) -> dict[str, Any]:
    """Load and answer all of them, in this process."""
    import specdec

    with specdec.load(**load) as llm:
        prompts = prompts_of(llm, n_texts, n_long, prompt_tokens)
        began = time.perf_counter()
        llm.generate(prompts, max_tokens=max_tokens, ignore_eos=True)
        seconds = time.perf_counter() - began
        memory, stats = process_memory(), llm.stats
    return {
        "seconds": seconds,
        "peak_rss_bytes": memory.peak_rss_bytes,
        "anonymous_bytes": memory.anonymous_bytes + memory.swap_bytes,
        "memory_budget_bytes": stats.memory_budget_bytes,
        "stats": stats.to_dict(),
    }


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    memory_budget: Annotated[str, typer.Option("--memory-budget")],
    output: Annotated[Path, typer.Option("--output", help="JSON report.")],
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    n_texts: Annotated[int, typer.Option("--texts", min=1)] = 64,
    n_long: Annotated[int, typer.Option("--prompts", min=0, help="Long ones of them.")] = 4,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=32)] = 1500,
    kv_tokens: Annotated[int, typer.Option("--kv-tokens", min=64)] = 8192,
    max_tokens: options.MaxTokens = 32,
) -> None:
    """Many texts inside a memory cgroup of the budget."""
    from specdec.cli.enforce import enforced_bytes, run_enforced

    if enforced_bytes() is None:
        raise typer.Exit(run_enforced("bench.checks.crowd", sys.argv[1:], memory_budget))
    load = {
        "model": model,
        "draft_model": draft_model,
        "memory_budget": memory_budget,
        "ctx_size": prompt_tokens + max_tokens,
        "kv_tokens": kv_tokens,
        "parallel": n_texts,
    }
    result = crowd(load, n_texts, n_long, prompt_tokens, max_tokens)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    stats = result["stats"]
    typer.echo(
        f"{n_texts} texts, {stats['set_aside']} times set aside, {stats['restored']} times read "
        f"back; peak {format_bytes(result['peak_rss_bytes'])} of "
        f"{format_bytes(result['memory_budget_bytes'])}"
    )


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.crowd", sys.argv[1:]))
