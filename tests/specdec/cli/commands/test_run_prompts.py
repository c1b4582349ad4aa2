"""`specdec run` with several prompts, with a user's turn, and with log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_pair import save_model

from specdec.cli.app import main

SHORT = ("--threads", "1", "--spec-type", "none", "-n", "4", "-c", "128")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "target", seed=1))


def reported(capsys: pytest.CaptureFixture[str], model: str, *more: str) -> list[dict[str, Any]]:
    assert main(["run", "-m", model, *SHORT, "--json", *more]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_several_prompts_are_answered_with_one_load(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("abc")
    both = reported(capsys, model, "-p", "abc", "-p", "xyz")
    assert [len(item["token_ids"]) for item in both] == [4, 4]
    assert reported(capsys, model, "-f", str(tmp_path / "a"))[0]["text"] == both[0]["text"]
    assert main(["run", "-m", model, *SHORT, "-p", "abc", "-p", "xyz"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("=== 1 of 2 ===\n" + both[0]["text"])
    assert "=== 2 of 2 ===\n" + both[1]["text"] in out


@pytest.mark.slow
def test_a_turn_is_given_as_the_template_has_it(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    (plain,) = reported(capsys, model, "-p", "hi", "--chat")
    assert plain["stats"]["prompt_tokens"] == len("User: hi\nAssistant:")
    (reported_before,) = reported(capsys, model, "-p", "hi", "--system", "Be brief.")
    assert reported_before["stats"]["prompt_tokens"] > plain["stats"]["prompt_tokens"]
    (chatml,) = reported(capsys, model, "-p", "hi", "--chat", "--chat-template", "chatml")
    assert chatml["stats"]["prompt_tokens"] > plain["stats"]["prompt_tokens"]


def test_log_probabilities(capsys: pytest.CaptureFixture[str], model: str) -> None:
    (answer,) = reported(capsys, model, "-p", "hi", "--logprobs", "2")
    (output,) = answer["outputs"]
    assert len(output["logprobs"]) == 4
    for token, logprob, likeliest in zip(
        output["token_ids"], output["logprobs"], output["top_logprobs"], strict=True
    ):
        assert likeliest[0] == [token, logprob]  # greedy
        assert len(likeliest) == 2
    (answer,) = reported(capsys, model, "-p", "hi", "--logprobs", "0")
    assert answer["outputs"][0]["top_logprobs"] is None
