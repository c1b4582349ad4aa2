"""Gain of drafting on a mixture: tokens per second and bytes by the size of the trees.

One process under the limit decodes every prompt with each size, and the sizes take turns, so that
neither a drift of the storage nor the cache's contents favour one: these mostly stem from another
prompt. Prefill is not timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.process.child import forget_model, measure_for_parent, result_of_child
from bench.prompts.workloads import WARM_UP_TOKENS
from specdec.config import SpecConfig
from specdec.metrics.stats import ratio

if TYPE_CHECKING:
    from specdec.api import LLM

Trees = Sequence[int | None]
"""Draft tokens per pass; None is automatic, 0 plain decoding."""


@dataclass(frozen=True)
class DepthsSpec:
    """Specification of one process's measurement. load: keywords of `specdec.load`."""

    load: dict[str, Any]
    prompts: list[str]
    max_tokens: int
    trees: list[int | None]


@dataclass
class Depth:
    """Totals of one tree size."""

    num_draft_tokens: int | None
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    bytes_read: int = 0
    experts_asked: int = 0
    experts_found: int = 0
    token_ids: list[list[int]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    """Index of each output's prompt."""

    @property
    def outputs(self) -> dict[int, list[int]]:
        return dict(zip(self.prompts, self.token_ids, strict=True))

    def results(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "tokens_per_second": ratio(self.tokens, self.seconds),
            "tokens_per_pass": ratio(self.tokens, self.passes),
            "bytes_per_token": ratio(self.bytes_read, self.tokens),
            "experts_per_pass": ratio(self.experts_asked, self.passes),
            "hit_rate": ratio(self.experts_found, self.experts_asked),
        }


def in_turns(trees: Trees, n_prompts: int) -> Iterator[tuple[int | None, int]]:
    """Yield (size, prompt index): each pair once, the sizes in turn."""
    for first in range(n_prompts):
        for i, n in enumerate(trees):
            yield n, (first + i) % n_prompts


def measure(values: Mapping[str, Any]) -> dict[str, Any]:
    from specdec.api import load

    spec = DepthsSpec(**values)
    depths = {n: Depth(n) for n in spec.trees}
    # With an automatic size, memory is planned as if no size was given.
    limit = None if None in spec.trees else max((n for n in spec.trees if n), default=None)
    with load(**{**spec.load, "num_draft_tokens": limit}) as llm:
        for prompt in spec.prompts:
            llm.generate(prompt, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        for n, number in in_turns(spec.trees, len(spec.prompts)):
            _decode(llm, spec.prompts[number], spec.max_tokens, depths[n])
            depths[n].prompts.append(number)
        plan = llm.plan.to_dict()
    return {
        "n_slots": plan.get("n_expert_slots", 0),
        "n_experts": plan.get("n_experts", 0),
        "share_held": ratio(plan.get("n_expert_slots", 0), plan.get("n_experts", 0)),
        "depths": [depth.results() for depth in depths.values()],
        "outputs_equal": all(d.outputs == depths[spec.trees[0]].outputs for d in depths.values()),
    }


def _decode(llm: LLM, prompt: str, n_tokens: int, into: Depth) -> None:
    llm.generate(prompt, max_tokens=1, ignore_eos=True)
    is_plain = into.num_draft_tokens == 0
    spec = None if is_plain else SpecConfig(num_draft_tokens=into.num_draft_tokens)
    began, before = time.perf_counter(), llm.target.transfer_stats
    result = llm.generate(
        prompt, max_tokens=n_tokens, ignore_eos=True, speculative=not is_plain, spec=spec
    )
    into.seconds += time.perf_counter() - began
    after = llm.target.transfer_stats
    into.tokens += result.stats.generated_tokens
    # The prompt's last pass, which gives the first token, is counted as well.
    into.passes += 1 + result.stats.passes
    into.bytes_read += after.bytes_streamed - before.bytes_streamed
    into.experts_asked += after.experts_asked - before.experts_asked
    into.experts_found += after.experts_found - before.experts_found
    into.token_ids.append(list(result.token_ids))


def measure_budget(spec: DepthsSpec, model: Path) -> dict[str, Any]:
    """Measure in a process of its own, after dropping the page cache."""
    forget_model(model)
    result = result_of_child("bench.experts.depths", spec, spec.load["memory_budget"])
    return {**result, "memory_budget": spec.load["memory_budget"]}


if __name__ == "__main__":
    sys.exit(measure_for_parent(sys.argv[1:], measure))
