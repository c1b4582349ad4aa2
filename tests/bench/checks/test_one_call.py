"""One call of many prompts beside many calls."""

from __future__ import annotations

import json

from bench.checks import one_call


def test_texts_are_equal_and_prompts_have_the_length(capsys) -> None:
    argv = ["-m", "pair:target", "-md", "pair:draft", "--n-prompts", "3", "--prompt-tokens", "70"]
    one_call.app([*argv, "-n", "4", "--memory-budget", "2GiB"], standalone_mode=False)
    *_, line = capsys.readouterr().out.strip().splitlines()
    result = json.loads(line)
    assert result["prompt_tokens"] == 3 * 70
    assert result["n_different"] == 0
    assert result["kv_tokens"] > 3 * 74
