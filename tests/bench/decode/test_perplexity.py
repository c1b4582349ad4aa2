"""Perplexity with each number format of the KV cache."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_pair import save_model

import specdec
from backends.contract.backend import PREFIX
from bench.commands.app import main
from bench.decode.perplexity import Scores, compare, summarise
from specdec.text.prompts import encode_prompt

TEXT = "".join(f"def function_{i}(x):\n    return x + {i}\n" for i in range(12))
WINDOW = 96


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.py"
    text.write_text(TEXT)
    model = save_model(tmp_path / "target", seed=0)
    return ["perplexity", "-m", str(model), "-c", str(WINDOW), "--text", str(text)]


def expected_losses(model: str) -> list[float]:
    """-log p of each scored token, from passes over one token each."""
    with specdec.load(model, spec_type="none", ctx_size=WINDOW) as llm:
        token_ids = encode_prompt(TEXT, llm.tokenizer)
        losses = []
        for start in range(0, len(token_ids) - WINDOW + 1, WINDOW):
            sequence = llm.target.new_sequence()
            for i in range(start, start + WINDOW - 1):
                node, logits = sequence.extend([token_ids[i]], [PREFIX])
                sequence.commit(node)
                if i + 1 >= start + WINDOW // 2:
                    row = logits[0].astype(np.float64)
                    losses.append(np.log(np.exp(row).sum()) - row[token_ids[i + 1]])
            sequence.close()
    return losses


def test_a_row_for_each_format(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--cache-types", "own,q8_0,fp8/own", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    losses = expected_losses(argv[2])
    assert len(losses) > WINDOW
    assert rows[0]["n_tokens"] == len(losses)
    assert rows[0]["perplexity"] == pytest.approx(np.exp(np.mean(losses)))
    assert [(row["cache_type_k"], row["cache_type_v"]) for row in rows] == [
        ("f32", "f32"),
        ("q8_0", "q8_0"),
        ("fp8", "f32"),
    ]
    n_bytes = [row["kv_bytes_per_token"] for row in rows]
    assert n_bytes[1:] == [n_bytes[0] * 10 // 32, n_bytes[0] * 5 // 8]  # heads of 8 numbers
    assert rows[0]["perplexity_change"] == 0.0
    assert all(0 < abs(row["perplexity_change"]) < 0.01 for row in rows[1:])


def test_the_table_says_what_was_scored(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--cache-types", "q8_0,fp8", "--max-windows", "1"]) == 0
    out = capsys.readouterr().out
    assert f"{WINDOW // 2} tokens of {argv[-1]}: the second half of each window of {WINDOW}" in out
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["q8_0", "fp8"]


def test_a_text_shorter_than_a_window_is_refused(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(argv[-1]).write_text("a few words")
    assert main(argv) == 2
    assert f"less than a window of {WINDOW}: give a longer --text" in capsys.readouterr().err


def test_formats_are_compared_token_by_token() -> None:
    rng = np.random.default_rng(0)
    losses = rng.exponential(2.0, 400)
    first = Scores(losses, np.arange(400))
    other = Scores(losses + 0.01, np.where(np.arange(400) < 100, 0, np.arange(400)))
    actual = compare(other, first)
    assert actual["perplexity_change"] == pytest.approx(np.expm1(0.01))
    assert actual["perplexity_change_error"] == pytest.approx(0.0, abs=1e-9)
    assert actual["same_likeliest_fraction"] == pytest.approx(301 / 400)
    assert summarise(first)["perplexity_error"] > 0.05 * summarise(first)["perplexity"]
