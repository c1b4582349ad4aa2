"""One setting of `specdec-bench predict`, in a process of its own.

    python -m bench.decode.prediction_run SPEC.json RESULT.json

What the plan predicts is taken before anything is decoded; then the same model decodes a few tokens
plainly and a few rounds with the draft.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.process.child import measure_for_parent
from specdec.decoding.stats import ratio
from specdec.drafters.model import max_beams

if TYPE_CHECKING:
    from specdec.api import LLM
    from specdec.decoding.stats import GenerationStats
    from specdec.planning.run_plan import RunPlan

PROBE_SECONDS = 4.0
WARM_UP_ROUNDS = 2  # the first passes pay for threads, caches and scratch memory


@dataclass(frozen=True)
class PredictionSpec:
    """What to run; written as JSON for the process that does it."""

    load: dict[str, Any]
    """Keywords of `specdec.load`."""
    prompt: str
    n_rounds: int
    """Passes of each kind."""

    @classmethod
    def read(cls, path: Path) -> PredictionSpec:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def measure(spec: PredictionSpec) -> dict[str, Any]:
    """Predicted and measured figures of both kinds of decoding.

    The storage is measured just before, as `specdec profile --refresh` does, and once more
    afterwards: a virtual disk may have changed its speed meanwhile.
    """
    from offload.ring.bandwidth import measure_storage
    from specdec.api import load
    from specdec.models.files import largest_weight_file
    from specdec.models.names import resolve_model

    weights = largest_weight_file(resolve_model(spec.load["model"]))
    measure_storage(weights, seconds=PROBE_SECONDS, refresh=True)
    with load(**spec.load) as llm:
        plan = llm.plan
        kinds = {}
        for name, is_speculative in (("plain", False), ("speculative", True)):
            _decode(llm, spec.prompt, WARM_UP_ROUNDS, is_speculative)
            stats = _decode(llm, spec.prompt, spec.n_rounds, is_speculative)
            kinds[name] = compare(plan, stats)
        figures = plan.to_dict()
    after = measure_storage(weights, seconds=PROBE_SECONDS, refresh=True)
    return {
        **kinds,
        "plan": figures,
        "storage_bytes_per_second_after": after.storage_bytes_per_second,
    }


def _decode(llm: LLM, prompt: str, n_rounds: int, speculative: bool) -> GenerationStats:
    """So many rounds after the prompt."""
    most = llm.max_context // 2
    stream = llm.stream(prompt, speculative=speculative, ignore_eos=True, max_tokens=most)
    for n_done, _ in enumerate(stream):  # the first chunk is the prompt's
        if n_done == n_rounds:
            break
    stream.cancel()
    return stream.result.stats


def compare(plan: RunPlan, stats: GenerationStats) -> dict[str, Any]:
    """What the plan said of passes of the size that ran, beside what they took.

    Tokens per pass and runs of the draft are the measured ones: how sure it is of its tokens, and
    how often it is right, is the draft's and not the plan's.
    """
    n_nodes = round(ratio(stats.drafted_tokens, stats.passes))
    n_rows = 1 + n_nodes
    n_runs = ratio(stats.draft_runs, stats.passes)
    drafting = 0.0
    if plan.chosen.draft is not None and n_runs > 0:
        n_abreast = min(max(1, round(stats.drafted_tokens / stats.draft_runs)), max_beams(n_nodes))
        drafting = n_runs * plan.chosen.draft.seconds(n_abreast)
    times = plan.chosen.target.times(n_rows, drafting)
    tokens = ratio(stats.generated_tokens - 1, stats.passes)
    predicted = {
        "pass_seconds": times.seconds,
        "stall_seconds": times.stall_seconds,
        "drafting_seconds": times.gap_seconds,
        "tokens_per_second": tokens / times.cycle_seconds,
    }
    measured = {
        "pass_seconds": ratio(stats.pass_seconds, stats.passes),
        # Of the prompt's pass, too.
        "stall_seconds": ratio(stats.stall_seconds, stats.passes + 1),
        "drafting_seconds": ratio(stats.draft_seconds, stats.passes),
        "tokens_per_second": stats.tokens_per_second,
    }
    return {
        "n_rows": n_rows,
        "tokens_per_pass": tokens,
        "draft_runs_per_pass": n_runs,
        "predicted": predicted,
        "measured": measured,
        "error": {
            name: ratio(predicted[name], measured[name]) - 1
            for name in ("pass_seconds", "tokens_per_second")
        },
    }


if __name__ == "__main__":
    sys.exit(measure_for_parent(sys.argv[1:], lambda path: measure(PredictionSpec.read(path))))
