"""specdec as one of the compared programs, with the same task and journal.

python -m bench.peers.specdec TASK.json JOURNAL.jsonl       (see bench.peers.program)
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from bench.peers.program import Clock, Journal, Task, run_program
from bench.prompts.workloads import Prompt

if TYPE_CHECKING:
    from specdec.api import LLM

_WARM_UP_TOKENS = 8  # the first passes pay for threads, caches and scratch memory


def program(task: Task, journal: Journal) -> None:
    """Run a task. Its options: keywords of `specdec.load`; spec_type "none" decodes plainly.

    Also "sampling", keywords of `LLM.generate`; "predict", whether to check the plan's prediction.
    """
    from bench.peers.prediction import compare, probe_storage
    from specdec.api import load

    options: dict[str, Any] = {
        **task.options,
        "memory_budget": task.memory_bytes,
        "ctx_size": task.n_ctx,
        "threads": task.n_threads,
    }
    sampling = options.pop("sampling", {"temperature": 0.0})
    predicts = options.pop("predict", False)
    if predicts:  # just before: a virtual disk changes its speed
        probe_storage(task.model)
    with load(task.model, task.draft, **options) as llm:
        settings = {**options, "draft_model": task.draft, "plan": llm.plan.to_dict()}
        if predicts and task.prompts:
            few = {**sampling, "max_tokens": _WARM_UP_TOKENS}
            llm.generate(task.prompts[0].text, **few)
        journal.loaded(settings)
        records = journal.decode(lambda prompt, clock: _decode(llm, task, sampling, prompt, clock))
        if predicts and records:
            journal.note("prediction", compare(llm.plan, records))
    if predicts:
        journal.note("storage_bytes_per_second_after", probe_storage(task.model))


def _decode(
    llm: LLM, task: Task, sampling: dict[str, Any], prompt: Prompt, clock: Clock
) -> dict[str, Any]:
    stream = llm.stream(
        prompt.text, max_tokens=task.n_tokens, ignore_eos=task.ignore_eos, **sampling
    )
    for chunk in stream:
        if chunk.token_ids:  # the last one may have text only
            clock.reach(len(chunk.token_ids))
        if clock.is_up:
            stream.cancel()
            break
    result = stream.result
    return {
        "token_ids": [int(token_id) for token_id in result.token_ids],
        "stats": result.stats.to_dict(),
    }


if __name__ == "__main__":
    sys.exit(run_program(sys.argv[1:], program))
