"""Correctness on a GPU: layers that move must give the results of layers that stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.gpu.settings import Note, Settings
from bench.prompts.workloads import BUILT_IN, read_prompts
from offload.budget import BudgetExceeded
from specdec.api import load
from specdec.config import SPEC_TYPES
from specdec.planning.plan import plan_run
from specdec.run_options import CPU, CUDA

_NUM_TOKENS = 8
_N_PLANS = 4


def drift(s: Settings, note: Note) -> None:
    """Compare bf16 logits of layers that move with those of resident layers."""
    from bench.checks.identity import record

    resident = record({"model": s.small_target, **_staying(s)}, streamed=False)
    moves = _moving(s, s.small_target, None)
    moving = record({"model": s.small_target, **moves}, streamed=True)
    differences = {
        name: float(np.abs(ours - theirs).max())
        for (name, ours), (_, theirs) in zip(moving, resident, strict=True)
    }
    note("largest_difference", max(differences.values()))
    note("differences", differences)
    note("largest_logit", max(float(np.abs(logits).max()) for _, logits in resident))
    note("drift_of_rows", _drift_of_rows(s))


def fp32(s: Settings, note: Note) -> None:
    """Compare greedy tokens of an fp32 model: resident, moving, with a draft, and on the CPU."""
    prompts = read_prompts(BUILT_IN, 2)
    modes: dict[str, tuple[bool, str | None, str]] = {  # do layers move, draft, device
        "staying": (False, None, s.device),
        "moving": (True, None, s.device),
        "moving, drafted": (True, s.draft, s.device),
        "cpu": (False, None, CPU),
    }
    result: dict[str, list[Sequence[int]]] = {}
    for name, (moves, draft, device) in modes.items():
        here = replace(s, device=device)
        options = _moving(here, s.exact_target, draft) if moves else _staying(here)
        with load(s.exact_target, draft, **options) as llm:
            outputs = [
                llm.generate(prompt.text, max_tokens=s.exact_tokens, ignore_eos=True)
                for prompt in prompts
            ]
            result[name] = [list(output.token_ids) for output in outputs]
    reference = result["staying"]
    note("equal", {name: tokens == reference for name, tokens in result.items()})


def _staying(s: Settings) -> dict[str, Any]:
    return {"device": s.device, "ctx_size": 256}


def _moving(s: Settings, model: Path, draft: str | None) -> dict[str, Any]:
    """Return options with which the layers of `model` stream, to the GPU if there is one."""
    name = "vram_budget" if s.device == CUDA else "memory_budget"
    return {**_staying(s), name: smallest_budget(name, model, draft, _staying(s))}


def smallest_budget(name: str, model: Path, draft: str | None, options: Mapping[str, Any]) -> int:
    """Return the smallest such budget that works now, with the draft if there is one; it is read
    from the error about a smaller one. Planning loads libraries, which take VRAM of the budget: so
    it is asked for several times."""
    keywords = dict(options)
    if draft is not None:
        keywords["spec_type"] = SPEC_TYPES  # or the error is that of a run without it
    n_bytes = 1
    for _ in range(_N_PLANS):
        try:
            plan_run(model, draft, **{**keywords, name: n_bytes})
        except BudgetExceeded as error:
            n_bytes = error.smallest_budget_bytes
    return n_bytes


def _drift_of_rows(s: Settings) -> float:
    """Return the largest difference of a logit between passes of one and of several tokens."""
    from backends.contract.backend import PREFIX

    with load(s.small_target, spec_type="none", num_beams=_NUM_TOKENS, **_staying(s)) as llm:
        kv, ids = llm.target.new_sequence(), llm.tokenizer.encode(read_prompts(BUILT_IN, 1)[0].text)
        kv.prefill(ids)
        rows: list[NDArray[np.float32]] = [kv.extend([5], [PREFIX])[1][0]]
        kv.rollback(len(ids))
        several = kv.extend(list(range(5, 5 + _NUM_TOKENS)), [PREFIX] * _NUM_TOKENS)[1]
        rows.append(several[0])
    return float(np.abs(rows[0] - rows[1]).max())
