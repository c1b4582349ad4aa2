"""Warnings from reading a model's headers and its tokenizer."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tiny_pair import VOCAB, save_model

from backends.contract.source import BackendOptions
from offload.errors import SpecdecError
from specdec.cli.app import main
from specdec.models.opened import PADDING_KEY, open_model


@pytest.mark.parametrize(
    ("num_tokens", "is_said"),
    [(VOCAB, False), (VOCAB + 25, False), (VOCAB + 30, True), (4096, True)],
)
def test_a_tokenizer_with_far_fewer_tokens_than_the_model_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_tokens: int, is_said: bool
) -> None:
    """The tokenizer may be another model's; a few padding rows are usual."""
    model = save_model(tmp_path / "model", seed=1, vocab_size=num_tokens)
    with caplog.at_level(logging.WARNING, "specdec"):
        open_model(model, BackendOptions())
    is_reported = (
        f"the tokenizer of {model} has {VOCAB} tokens, the model {num_tokens}: " in caplog.text
    )
    assert is_reported == is_said


@pytest.mark.parametrize(("first", "is_said"), [(VOCAB, False), (4000, True), ("all", True)])
def test_padding_that_the_config_names_is_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: object, is_said: bool
) -> None:
    model = save_model(tmp_path / "model", seed=1, vocab_size=4096)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, PADDING_KEY: first}))
    with caplog.at_level(logging.WARNING, "specdec"):
        open_model(model, BackendOptions())
    assert ("the tokenizer of" in caplog.text) == is_said


BESIDE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)


@pytest.mark.parametrize("name", BESIDE_WEIGHTS)
def test_a_git_lfs_pointer_is_reported_for_any_file(tmp_path: Path, name: str) -> None:
    """transformers would use the pointer's text as a chat template."""
    model = save_model(tmp_path / "model", seed=1)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
    )
    with pytest.raises(SpecdecError, match=rf"{name} is a Git LFS pointer .* `git lfs pull`"):
        open_model(model, BackendOptions())


def test_the_command_line_shows_it_as_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model", seed=1, vocab_size=4096)
    assert main(["run", "-m", str(model), "-p", "a", "-n", "1", "--threads", "1"]) == 0
    assert f"note: the tokenizer of {model} has {VOCAB} tokens" in capsys.readouterr().err
