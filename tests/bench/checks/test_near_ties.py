"""Near ties are told apart from real differences."""

import pytest
from alone import own
from checkpoints import save_tiny_checkpoint
from safetensors.torch import load_file, save_file

from backends.hf.backend import TorchBackend
from bench.checks.near_ties import examine

PROMPT = [5, 17, 60, 33, 8]


@pytest.fixture
def target(checkpoint_factory, tmp_path):
    """A model with equal logits for tokens 40 and 41."""
    for file in checkpoint_factory("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for shard in tmp_path.glob("*.safetensors"):
        tensors = load_file(shard)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"][41] = tensors["lm_head.weight"][40]
            save_file(tensors, shard)
    with TorchBackend.resident(tmp_path) as backend:
        yield backend


def test_equal_outputs_have_nothing_to_explain(target):
    assert examine(target, PROMPT, [1, 2, 3], [1, 2, 3]) is None
    assert examine(target, PROMPT, [1, 2, 3], [1, 2]) is None


def test_tokens_of_equal_logits_are_a_near_tie(target):
    tie = examine(target, PROMPT, [9, 40, 3], [9, 41, 3])
    assert tie is not None
    assert (tie.position, tie.tokens, tie.gap) == (1, (40, 41), 0.0)
    assert tie.is_explained


def test_a_wrong_token_is_not(target):
    own(target).rollback(0)
    row = own(target).prefill([*PROMPT, 9])
    best, worst = int(row.argmax()), int(row.argmin())
    tie = examine(target, PROMPT, [9, best], [9, worst])
    assert tie is not None
    assert tie.gap == pytest.approx(float(row.max() - row.min()), abs=1e-4)
    assert tie.drift < 1e-4
    assert not tie.is_explained


def test_a_target_with_capacity_for_few_nodes_is_examined_too(tmp_path, monkeypatch):
    save_tiny_checkpoint("llama", tmp_path)
    with TorchBackend.resident(tmp_path) as backend:
        monkeypatch.setattr(backend, "max_nodes", 9)
        tie = examine(backend, [5, 6, 7], [8, 9], [8, 10])
    assert tie is not None
    assert tie.position == 1
