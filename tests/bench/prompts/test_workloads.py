"""The built-in prompts."""

from __future__ import annotations

from bench.prompts.workloads import BUILT_IN, read_prompts


def test_the_built_in_prompts() -> None:
    prompts = read_prompts(BUILT_IN, 16)
    assert len({prompt.text for prompt in prompts}) == 16
