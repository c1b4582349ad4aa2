"""The automatic policy against fixed sizes of trees: how near does it come to the best one?

One loaded pair decodes every prompt in every way, in turns that rotate, so that a drift of the
machine falls on all of them. Each way has an experience of its own: the automatic one learns
nothing from the fixed ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from bench import figures as aggregate
from bench.decode.measure import WARM_UP_TOKENS, Record
from bench.process.child import measure_for_parent, quiet_libraries, result_of_child
from bench.process.provenance import collect
from bench.process.results import append_line
from bench.prompts.workloads import Prompt
from offload.errors import SpecdecError
from specdec.config import SpecConfig
from specdec.decoding.stats import ratio
from specdec.policy.lessons import Experience

if TYPE_CHECKING:
    from specdec.api import LLM

AUTO, PLAIN = "auto", "plain"


class SweepMistake(SpecdecError, ValueError):
    """Sizes of trees that make no sense."""


@dataclass(frozen=True)
class TreeSize:
    """A fixed size: draft tokens and levels; drafting ahead as asked for elsewhere, or as here."""

    n_nodes: int
    depth: int
    draft_ahead: str | None = None

    @property
    def name(self) -> str:
        size = f"{self.n_nodes}x{self.depth}"
        return size if self.draft_ahead is None else f"{size}:{self.draft_ahead}"

    def apply(self, spec: SpecConfig) -> SpecConfig:
        ahead = self.draft_ahead or spec.draft_ahead
        return replace(
            spec, num_draft_tokens=self.n_nodes, draft_depth=self.depth, draft_ahead=ahead
        )


def parse_sizes(text: str) -> tuple[TreeSize, ...]:
    """From "8x4,16x8:on": draft tokens x levels, drafting ahead or not. Raises SweepMistake."""
    return tuple(_parse_size(part.strip()) for part in text.split(","))


def _parse_size(text: str) -> TreeSize:
    size, colon, ahead = text.partition(":")
    left, x, right = size.partition("x")
    is_size = x and left.isdigit() and right.isdigit() and int(left) and int(right)
    if not is_size or (colon and ahead not in ("on", "off")):
        raise SweepMistake(
            f"--sizes has {text!r}: give draft tokens x levels, e.g. 8x4,16x8; "
            "16x8:on and 16x8:off draft ahead or not"
        )
    return TreeSize(int(left), int(right), ahead or None)


@dataclass(frozen=True)
class PolicySpec:
    """What to measure; written as JSON for the process that does it."""

    load: dict[str, Any]
    """Keywords of `specdec.load`; "model" is a local directory or file."""
    prompts: tuple[Prompt, ...]
    sampling: dict[str, Any]
    """Keywords of `LLM.generate`."""
    sizes: tuple[TreeSize, ...]
    with_plain: bool
    log: str | None = None
    """JSON lines, appended to as records are made."""

    @classmethod
    def read(cls, path: Path) -> PolicySpec:
        values = json.loads(path.read_text(encoding="utf-8"))
        prompts = tuple(Prompt(**prompt) for prompt in values.pop("prompts"))
        sizes = tuple(TreeSize(**size) for size in values.pop("sizes"))
        return cls(prompts=prompts, sizes=sizes, **values)


def sweep_in_child(spec: PolicySpec, argv: Sequence[str], *, enforce: bool) -> dict[str, Any]:
    """`run_sweep` in a process of its own, inside a cgroup of the memory budget if enforced.

    Raises typer.Exit with the child's exit code where that has told why it failed.
    """
    quiet_libraries()
    provenance = collect(argv, Path(spec.load["model"]))
    limit = spec.load["memory_budget"] if enforce else None
    result = result_of_child("bench.decode.policy", spec, limit)
    return {**result, "enforced": enforce, "provenance": provenance}


def run_sweep(spec: PolicySpec, out: TextIO = sys.stderr) -> dict[str, Any]:
    """Decode every prompt in every way; rows by way, the two ratios that matter, all records."""
    from specdec.api import load

    most = max(size.n_nodes for size in spec.sizes)
    with load(**{**spec.load, "num_draft_tokens": most}) as llm:
        plan = llm.plan.to_dict()
        ways = _ways(llm.spec, spec.sizes, spec.with_plain)
        records = _measure_all(llm, spec, ways, out)
    model = str(spec.load["model"])
    return {**summarise(records), "model": model, "plan": plan, "records": records}


def _ways(spec: SpecConfig, sizes: Sequence[TreeSize], with_plain: bool) -> dict[str, SpecConfig]:
    fixed = {size.name: size.apply(spec) for size in sizes}
    auto = replace(spec, num_draft_tokens=None, draft_depth=None)
    plain = {PLAIN: replace(spec, spec_type=())} if with_plain else {}
    return {**plain, **fixed, AUTO: auto}


def _measure_all(
    llm: LLM, sweep: PolicySpec, ways: Mapping[str, SpecConfig], out: TextIO
) -> list[dict[str, Any]]:
    plan, prompts, sampling = llm.plan, sweep.prompts, sweep.sampling
    experiences = {
        name: Experience(plan.pass_cost, plan.draft_cost, plan.n_draft_tokens) for name in ways
    }
    for spec in ways.values():  # threads, caches and scratch memory, not the policy
        llm.generate(prompts[0].text, spec=spec, **{**sampling, "max_tokens": WARM_UP_TOKENS})
    names, records = list(ways), []
    for i, prompt in enumerate(prompts):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            llm.session.experience = experiences[name]
            result = llm.generate(prompt.text, spec=ways[name], **sampling)
            stats = result.stats.to_dict()
            tokens = [int(token) for token in result.token_ids]
            record = Record(prompt.name, name, tokens, result.finish_reason, stats, 0.0)
            records.append(asdict(record))
            if sweep.log is not None:
                append_line(records[-1], Path(sweep.log))
            speed = result.stats.tokens_per_second
            print(f"{prompt.name} {name}: {speed:.2f} tok/s", file=out, flush=True)
    return records


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row for each way; the automatic one against the best fixed one and against plain."""
    rows = []
    for name in dict.fromkeys(record["mode"] for record in records):
        of_way = aggregate.of_mode(records, name)
        stats = aggregate.aggregate_stats(of_way)
        rows.append(
            {
                "way": name,
                "tokens_per_second": stats["tokens_per_second"],
                "mean_acceptance_length": stats["mean_acceptance_length"],
                "mean_tree_nodes": ratio(stats["drafted_tokens"], stats["passes"]),
                "draft_share": ratio(stats["draft_seconds"], stats["decode_seconds"]),
                "is_lossless": stats["is_lossless"],
            }
        )
    speeds = {row["way"]: float(row["tokens_per_second"]) for row in rows}
    fixed = {name: speed for name, speed in speeds.items() if name != AUTO}
    best = max(fixed, key=lambda name: fixed[name])
    return {
        "rows": rows,
        "best_fixed": best,
        "auto_versus_best_fixed": ratio(speeds[AUTO], fixed[best]),
        "auto_versus_plain": ratio(speeds[AUTO], speeds[PLAIN]) if PLAIN in speeds else None,
    }


if __name__ == "__main__":
    sys.exit(measure_for_parent(sys.argv[1:], lambda path: run_sweep(PolicySpec.read(path))))
