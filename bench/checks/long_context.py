"""Passes at the end of a long context whose KV does not fit in the budget.

    python -m bench.checks.long_context -m MODEL -md DRAFT --memory-budget 3.5GiB

The prompt is computed first; then the same prompt, whose KV is cached by then, is decoded from,
plainly and with draft tokens. Prints seconds per pass, the bytes of weights and of KV that a pass
reads, and the ratio of its seconds to those that the storage takes for these bytes; then one JSON
line with provenance. The exit code is 2 if a plain pass takes more than --limit times as long as
its reads, or if the two texts differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.process.provenance import ROOT, collect
from bench.table import Table, text_of
from offload.errors import SpecdecError
from specdec.cli.errors import run_app

if TYPE_CHECKING:
    from specdec.api import LLM

_HEADINGS = ("decoding", "tokens/s", "tokens/pass", "s/pass", "weights GB", "KV GB", "of reads")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class SlowPasses(SpecdecError):
    """Passes take longer than the storage needs for what they read, or change the text."""


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    memory_budget: Annotated[str | None, typer.Option("--memory-budget")] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens")] = 32_000,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens")] = 64,
    temperature: Annotated[float, typer.Option("--temperature")] = 0.0,
    text: Annotated[
        Path | None, typer.Option(help="File to take the prompt from; default: specdec's code.")
    ] = None,
    prompt_cache_dir: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the prompt's KV, which is computed once then."),
    ] = None,
    limit: Annotated[float, typer.Option("--limit", help="Largest allowed ratio.")] = 1.15,
) -> None:
    """Measure passes at the end of a long context."""
    import specdec

    ctx_size = prompt_tokens + max_tokens + 1
    load: dict[str, Any] = {"model": model, "ctx_size": ctx_size, "parallel": 1}
    load |= {"memory_budget": memory_budget} if memory_budget else {}
    load |= {"prompt_cache_dir": str(prompt_cache_dir)} if prompt_cache_dir else {}
    asked = {"max_tokens": max_tokens, "ignore_eos": True, "seed": 0, "temperature": temperature}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"spec_type": "none"},
        "speculative": {"draft_model": draft_model} if draft_model else {},
    }
    rows, token_ids = {}, []
    for name, options in kinds.items():
        with specdec.load(**load, **options) as llm:
            result = measure(llm, prompt_of(llm, prompt_tokens, text), asked)
        token_ids.append(result.pop("token_ids"))
        rows[name] = result
    typer.echo(text_of([table_of(rows)]))
    typer.echo(json.dumps({**rows, "load": load, "draft_model": draft_model, **collect(sys.argv)}))
    if token_ids[0] != token_ids[1]:
        raise SlowPasses("the speculative text differs from the plain one")
    if rows["plain"]["ratio"] > limit:
        raise SlowPasses(
            f"a pass takes {rows['plain']['ratio']:.2f} x as long as the storage takes for its "
            f"reads, more than {limit:g}: measure again on an idle machine"
        )


def measure(llm: LLM, prompt: list[int], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of decoding from a prompt whose KV was computed before."""
    first = llm.generate(prompt, max_tokens=1, ignore_eos=True).stats
    result = llm.generate(prompt, **asked)
    stats, plan = result.stats, llm.plan
    n_passes = stats.passes + 1  # that of the prompt's last token
    weights, kv = stats.bytes_streamed / n_passes, stats.kv_bytes_read / n_passes
    bandwidth = plan.storage_bytes_per_second
    seconds = stats.pass_seconds / max(1, stats.passes)
    return {
        "prompt_seconds": first.time_to_first_token,
        "prompt_kv_bytes_read": first.kv_bytes_read,
        "prompt_kv_bytes_written": first.kv_bytes_written,
        "prompt_bytes_streamed": first.bytes_streamed,
        "tokens_per_second": stats.tokens_per_second,
        "tokens_per_pass": stats.mean_acceptance_length,
        "pass_seconds": seconds,
        "streamed_bytes_per_pass": weights,
        "kv_bytes_per_pass": kv,
        "storage_bytes_per_second": bandwidth,
        "ratio": seconds * bandwidth / max(1.0, weights + kv),
        "reused_prompt_tokens": stats.reused_prompt_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "peak_memory_bytes": stats.peak_memory_bytes,
        "hot_kv_tokens": plan.kv_tokens if plan.kv_split is None else plan.kv_split.hot_tokens,
        "token_ids": list(result.token_ids),
    }


def table_of(rows: dict[str, dict[str, Any]]) -> Table:
    cells = tuple(
        (
            name,
            f"{row['tokens_per_second']:.3f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['pass_seconds']:.3f}",
            f"{row['streamed_bytes_per_pass'] / 1e9:.2f}",
            f"{row['kv_bytes_per_pass'] / 1e9:.2f}",
            f"{row['ratio']:.2f}",
        )
        for name, row in rows.items()
    )
    plain = rows["plain"]
    about = (
        f"prompt of {plain['prompt_tokens']} tokens in {plain['prompt_seconds']:.1f} s; "
        f"{plain['hot_kv_tokens']} tokens of KV in memory; storage "
        f"{plain['storage_bytes_per_second'] / 1e9:.2f} GB/s"
    )
    return Table("Passes at the end of the context", _HEADINGS, cells, (about,))


def prompt_of(llm: LLM, num_tokens: int, path: Path | None = None) -> list[int]:
    """Return the first tokens of a text, repeated where it is shorter; default: specdec's code."""
    if path is None:
        text = "\n".join(x.read_text() for x in sorted((ROOT / "specdec").rglob("*.py")))
    else:
        text = path.read_text(encoding="utf-8", errors="replace")
    ids: list[int] = list(llm.tokenizer.encode(text[: 16 * num_tokens]))
    while len(ids) < num_tokens:
        ids += ids
    return ids[:num_tokens]


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.long_context", sys.argv[1:]))
