"""Tokens per second by number of sequences that share one read of the model.

One loaded pair decodes the same prompts in groups of every size, with drafts and without. Plain
groups are FlexGen's method (Sheng et al. 2023): one token per sequence in each pass. Every output
must equal plain decoding of the sequence alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from bench.checks.equal_outputs import OutputsDiffer
from bench.process.child import measure_for_parent, result_of_child
from bench.prompts.workloads import Prompt
from specdec.metrics.stats import ratio

PLAIN, SPECULATIVE = "plain", "speculative"


@dataclass(frozen=True)
class ThroughputSpec:
    """Specification of one process's measurement.

    load: keywords of `specdec.load`.
    counts: group sizes. The first `min_prompts` prompts are decoded at each count, or `count` of
        them if that is more.
    """

    load: dict[str, Any]
    prompts: list[Prompt]
    sampling: dict[str, Any]
    counts: list[int]
    modes: list[str]
    min_prompts: int

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> ThroughputSpec:
        prompts = [Prompt(**prompt) for prompt in values["prompts"]]
        return cls(**{**values, "prompts": prompts})


def run_throughput(spec: ThroughputSpec, *, enforce: bool) -> dict[str, Any]:
    """Return rows by count and mode, plan, model, enforced.

    Raises typer.Exit with the child's exit code if the child has reported its error.
    """
    limit = spec.load["memory_budget"] if enforce else None
    measured = result_of_child("bench.decode.throughput", spec, limit)
    return {**measured, "model": spec.load["model"], "enforced": enforce}


def measure(spec: ThroughputSpec, out: TextIO) -> dict[str, Any]:
    """Run the whole specification; progress goes to `out`."""
    from specdec.api import load
    from specdec.cli.progress import loading_progress

    with loading_progress(f"loading {spec.load['model']}") as progress:
        llm = load(**spec.load, progress=progress)
    with llm:
        cost = llm.plan.cost_model
        rows: list[dict[str, Any]] = []
        outputs: dict[int, tuple[int, ...]] = {}
        for count in spec.counts:
            for mode in spec.modes:
                row = _measure_row(llm, spec, count, mode, outputs)
                row["roofline"] = count / cost.seconds(count) if mode == PLAIN else None
                rows.append(row)
                print(f"{count} {mode}: {row['tokens_per_second']:.2f} tokens/s", file=out)
        return {"rows": rows, "plan": llm.plan.to_dict()}


def _measure_row(
    llm: Any, spec: ThroughputSpec, count: int, mode: str, outputs: dict[int, tuple[int, ...]]
) -> dict[str, Any]:
    prompts = [prompt.text for prompt in spec.prompts[: max(count, spec.min_prompts)]]
    llm.session.forget_prompt()  # every mode prefills the prompts itself
    before, began = llm.target.transfer_stats.bytes_streamed, time.perf_counter()
    results = []
    for start in range(0, len(prompts), count):
        group = prompts[start : start + count]
        results += llm.generate(group, speculative=mode == SPECULATIVE, **spec.sampling)
    seconds = time.perf_counter() - began
    n_tokens = sum(result.stats.generated_tokens for result in results)
    n_different = sum(
        outputs.setdefault(i, result.token_ids) != result.token_ids
        for i, result in enumerate(results)
    )
    return {
        "num_seqs": count,
        "mode": mode,
        "n_prompts": len(prompts),
        "generated_tokens": n_tokens,
        "seconds": seconds,
        "tokens_per_second": ratio(n_tokens, seconds),
        "bytes_per_token": ratio(llm.target.transfer_stats.bytes_streamed - before, n_tokens),
        "tokens_per_pass_of_a_sequence": ratio(
            n_tokens - len(results), sum(result.stats.passes for result in results)
        ),
        "n_different_outputs": n_different,
        "is_exact": all(result.stats.is_exact for result in results),
        "peak_memory_bytes": results[-1].stats.peak_memory_bytes,
    }


def refuse_differences(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise OutputsDiffer if outputs of an exact target are not equal."""
    n_different = sum(row["n_different_outputs"] for row in rows if row["is_exact"])
    if n_different:
        raise OutputsDiffer(
            f"{n_different} sequences differ from the first one of the same prompt, although the "
            "target is exact: this should not happen, please report it"
        )


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line per mode: the speedup of the largest group over the smallest."""
    lines = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        own = [row for row in rows if row["mode"] == mode]
        first, last = own[0], own[-1]
        times = ratio(last["tokens_per_second"], first["tokens_per_second"])
        lines.append(f"{mode}: {last['num_seqs']} sequences {times:.2f} x {first['num_seqs']}")
    return lines


if __name__ == "__main__":
    sys.exit(
        measure_for_parent(
            sys.argv[1:], lambda values: measure(ThroughputSpec.from_values(values), sys.stderr)
        )
    )
