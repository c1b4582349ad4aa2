"""Passes at the end of a long context, plain and speculative."""

from __future__ import annotations

import json

import pytest
from tiny_pair import save_model

import specdec
from bench.checks import long_context
from offload.units import MIB

SIZES = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}


def test_passes_read_kv_that_does_not_fit(tmp_path, capsys) -> None:
    model = save_model(tmp_path / "model", seed=0, **SIZES)
    smallest = specdec.plan_run(model, ctx_size=2000 + 9, parallel=1).smallest_budget_bytes
    argv = ["-m", str(model), "--prompt-tokens", "2000", "-n", "8", "--limit", "1e9"]
    budget = f"{(smallest + 24 * MIB) // MIB}MiB"
    long_context.app([*argv, "--memory-budget", budget], standalone_mode=False)
    *_, line = capsys.readouterr().out.strip().splitlines()
    result = json.loads(line)
    for kind in ("plain", "speculative"):
        row = result[kind]
        assert row["prompt_tokens"] == 2000
        assert row["reused_prompt_tokens"] > 1900
        assert row["hot_kv_tokens"] < 2000
        assert 0 < row["kv_bytes_per_pass"] < 2009 * 32 * 1024
        assert row["prompt_kv_bytes_written"] > 0


def test_slow_passes_are_an_error(capsys) -> None:
    argv = ["-m", "pair:target", "--prompt-tokens", "60", "-n", "3", "--limit", "0"]
    with pytest.raises(long_context.SlowPasses, match="x as long as the storage takes"):
        long_context.app([*argv, "--memory-budget", "2GiB"], standalone_mode=False)
    assert "s/pass" in capsys.readouterr().out
