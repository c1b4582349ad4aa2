"""How long texts that decode wait for each other's prompts: the longest gap, in passes.

    python -m bench.decode.longest_gap -m MODEL -md DRAFT --memory-budget 3.5GiB --output-file FILE

Inside a memory cgroup of the budget. Some texts decode; then long prompts come, and enter in chunks
beside them. A gap of the others is the time from the end of one pass to the end of the next one,
drafting included. It is told twice: as measured, in units of the median gap while nobody enters,
and as planned from the rows of its pass, in units of a pass with one row for each text, which does
not depend on what else runs here.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bench import options
from bench.prompts.workloads import BUILT_IN, read_prompts
from offload.process.memory import process_memory
from specdec.cli.errors import run_app

WARM_PASSES = 12
"""Before prompts come, and after they have entered: what a gap is without them."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Pass:
    """n_texts: that decode in it."""

    n_texts: int
    n_prompt_rows: int
    n_rows: int
    pass_seconds: float
    ended_at: float


def measure(
    llm: Any, short: Sequence[Any], long: Sequence[Sequence[int]], sampling: dict[str, Any]
) -> list[Pass]:
    """All passes from the first one in which every short prompt decodes."""
    passes: list[Pass] = []
    run = llm.target.run

    def noted(batch: Any) -> Any:
        began = time.perf_counter()
        found = run(batch)
        ended = time.perf_counter()
        prompts = [one for one in batch if one.parents is None]
        n_prompt_rows = sum(len(one.token_ids) for one in prompts)
        n_rows = sum(len(one.token_ids) for one in batch)
        n_texts = len(batch) - len(prompts)
        passes.append(Pass(n_texts, n_prompt_rows, n_rows, ended - began, ended))
        return found

    llm.target.run = noted
    try:
        decoding = [llm.stream(prompt, **sampling) for prompt in short]
        for stream in decoding:
            stream.start()
        _decode(decoding, passes, WARM_PASSES)
        entering = [llm.stream(prompt, max_tokens=2, ignore_eos=True) for prompt in long]
        for stream in entering:
            stream.start()
        while not all(stream.is_over for stream in [*entering]) and not _is_any_over(decoding):
            _decode(decoding, passes, 1)
        _decode(decoding, passes, WARM_PASSES)
        for stream in [*decoding, *entering]:
            stream.cancel()
    finally:
        llm.target.run = run
    first = next((i for i, one in enumerate(passes) if one.n_texts == len(short)), len(passes))
    return passes[first:]


def _decode(streams: Sequence[Any], passes: Sequence[Pass], n_passes: int) -> None:
    """So many passes more, in this thread, or less where a text comes to its end."""
    goal = len(passes) + n_passes
    while len(passes) < goal and not _is_any_over(streams):
        next(streams[0], None)


def _is_any_over(streams: Sequence[Any]) -> bool:
    return any(stream.is_over for stream in streams)


def summarise(passes: Sequence[Pass], cost: Any) -> dict[str, Any]:
    """cost: the plan's, of a pass."""
    gaps = [
        (after, after.ended_at - before.ended_at)
        for before, after in zip(passes, passes[1:], strict=False)
    ]
    usual = statistics.median(gap for one, gap in gaps if not one.n_prompt_rows)
    entered = [(one, gap) for one, gap in gaps if one.n_prompt_rows]
    longest, longest_gap = max(entered, key=lambda found: found[1])
    planned = [cost.seconds(one.n_rows) / cost.seconds(one.n_texts) for one, _ in entered]
    return {
        "n_passes_with_prompts": len(entered),
        "n_prompt_rows": sum(one.n_prompt_rows for one, _ in entered),
        "most_rows": max(one.n_rows for one, _ in entered),
        "usual_gap_seconds": usual,
        "longest_gap_seconds": longest_gap,
        "longest_gap_in_gaps": longest_gap / usual,
        "longest_gap_pass_seconds": longest.pass_seconds,
        "longest_planned_pass_in_passes": max(planned),
    }


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    memory_budget: Annotated[str, typer.Option("--memory-budget")],
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    n_texts: Annotated[int, typer.Option("--texts", min=1, help="That decode.")] = 4,
    n_prompts: Annotated[int, typer.Option("--prompts", min=1, help="That enter.")] = 2,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=32)] = 1500,
    max_tokens: options.MaxTokens = 400,
    output_file: options.OutputFile = None,
) -> None:
    """The longest gap of texts that decode while long prompts enter."""
    import specdec
    from specdec.cli.enforce import enforced_bytes, run_enforced

    if enforced_bytes() is None:
        raise typer.Exit(run_enforced("bench.decode.longest_gap", sys.argv[1:], memory_budget))
    ctx_size = prompt_tokens + max_tokens
    prompts = [prompt.text for prompt in read_prompts(BUILT_IN)]
    with specdec.load(
        model,
        draft_model,
        memory_budget=memory_budget,
        ctx_size=ctx_size,
        parallel=n_texts + n_prompts,
        kv_tokens=n_texts * (max_tokens + 128) + n_prompts * ctx_size,
    ) as llm:
        ids = [token for text in prompts for token in llm.tokenizer.encode(text)]
        ids *= 1 + prompt_tokens // len(ids) + n_prompts
        long = [ids[7 * i : 7 * i + prompt_tokens] for i in range(n_prompts)]
        short = [prompts[i % len(prompts)] for i in range(n_texts)]
        sampling = {"max_tokens": max_tokens, "ignore_eos": True}
        passes = measure(llm, short, long, sampling)
        result = summarise(passes, llm.plan.pass_cost)
        result["memory_limit_bytes"] = enforced_bytes()
        result["peak_rss_bytes"] = process_memory().peak_rss_bytes
    told = json.dumps(result, indent=1)
    if output_file is not None:
        output_file.write_text(told + "\n", encoding="utf-8")
    typer.echo(told)


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.decode.longest_gap", sys.argv[1:]))
