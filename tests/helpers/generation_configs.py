"""Our parameters as a GenerationConfig, to compare with transformers' `generate`."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import GenerationConfig

from specdec.sampling.hf_config import OF_BEAMS, SAME_VALUE, WARPERS
from specdec.sampling.params import SamplingParams


def generation_config(params: SamplingParams) -> GenerationConfig:
    """Return the configuration with which `generate` does the same."""
    options = dataclasses.asdict(params)
    is_greedy = options["temperature"] == 0.0
    values = {theirs: _plain(options[ours]) for theirs, ours in SAME_VALUE.items()}
    values |= {
        "do_sample": not is_greedy,
        "repetition_penalty": float(options["repetition_penalty"]),
        "min_new_tokens": options["min_tokens"] or None,
        "max_new_tokens": options["max_tokens"] if options["max_length"] is None else None,
        "max_length": options["max_length"],
    }
    if options["num_beams"] > 1:
        values |= {name: options[name] for name in OF_BEAMS}
    if not is_greedy:
        values |= {name: options[name] for name in ("temperature", *WARPERS)}
        values["min_p"] = options["min_p"] or None
    return GenerationConfig(**values)


def _plain(value: Any) -> Any:
    """Return lists for tuples, None for an empty one."""
    if isinstance(value, tuple):
        return [_plain(item) if isinstance(item, tuple) else item for item in value] or None
    return value
