"""Agreement of drafts on a target's output, and prompts cut from C files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.checks.draft_agreement import chain_passes, measure, target_outputs
from bench.prompts.cut import main
from bench.prompts.workloads import read_prompts


@pytest.mark.parametrize(
    ("agrees", "n_passes"), [("1111", 1), ("0000", 4), ("1101", 2), ("11111111", 2), ("0111", 2)]
)
def test_passes_of_chains(agrees: str, n_passes: int) -> None:
    assert chain_passes([mark == "1" for mark in agrees], 4) == n_passes


def test_a_target_agrees_with_itself_and_a_draft_less() -> None:
    outputs = target_outputs("pair:target", ["def f(x):\n"], 24, 0.0, "1GiB")
    assert len(outputs[0].token_ids) == 24
    itself, draft = (measure(f"pair:{name}", outputs, 8) for name in ("target", "draft"))
    assert itself["agreement"] > 0.95
    assert 1 <= draft["tokens_per_pass"] <= itself["tokens_per_pass"]


def test_prompts_end_where_a_function_begins(tmp_path: Path) -> None:
    body = "static int f(int x)\n{\n    return x + 1;\n}\n\n"
    (tmp_path / "a.c").write_text("/* begin */\n" + body * 40)
    (tmp_path / "b.c").write_text("int x;\n")
    main(tmp_path, tmp_path / "p.jsonl", n_prompts=3, n_chars=200)
    prompts = read_prompts(tmp_path / "p.jsonl")
    assert [prompt.name for prompt in prompts] == ["a-0", "a-1", "a-2"]
    assert all(len(p.text) == 200 and p.text.endswith("int x)\n{\n") for p in prompts)
    assert json.loads((tmp_path / "p.jsonl").read_text().split("\n")[0])["category"] == "c"
