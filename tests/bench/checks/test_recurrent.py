"""Measurements of recurrent layers and of second turns, on tiny hybrids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import save_tiny_checkpoint
from tiny_pair import save_tokenizer

from bench.checks import recurrent_nodes, second_turn


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    save_tiny_checkpoint("qwen3.5", directory, vocab_size=259, max_position_embeddings=2048)
    save_tokenizer(directory)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    (directory / "chat_template.jinja").write_text(template)
    return directory


def test_nodes_beside_products(hybrid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recurrent_nodes.main(str(hybrid), "1,4", 1, 1)
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert len(result["kinds"]) == len(result["states"]) == 2
    assert [row["n_nodes"] for row in result["seconds"]] == [1, 4]
    assert all(row[kind] > 0 for row in result["seconds"] for kind in ("products", "chain", "tree"))
    assert "one layer of qwen3_5_text" in table[0]


def test_a_model_without_recurrent_layers(checkpoint_factory) -> None:
    with pytest.raises(recurrent_nodes.NoRecurrentLayer, match="llama has no recurrent layers"):
        recurrent_nodes.main(str(checkpoint_factory("llama")), "1", 1, 1)


def test_a_second_turn(hybrid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = {"memory_budget": None, "ctx_size": 768, "prompt_tokens": 100, "new_tokens": 40}
    second_turn.main(str(hybrid), None, **load, max_tokens=4, n_turns=1, limit=1e9)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < result["computed_tokens"] < result["prompt_tokens"] - 100
    assert result["state_bytes"] > 0
    with pytest.raises(second_turn.SlowTurn, match="of its new tokens alone, more than 0"):
        second_turn.main(str(hybrid), None, **load, max_tokens=4, n_turns=1, limit=0.0)
