"""`specdec run` with several prompts, with a user's turn, and with log-probabilities."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from command_line import expect_error
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


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a chat template."""
    folder = save_model(tmp_path_factory.mktemp("models") / "instruct", seed=1)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    )
    return str(folder)


def test_a_model_with_a_template_is_asked_and_raw_completes(
    capsys: pytest.CaptureFixture[str], instruct: str
) -> None:
    hint = (
        "specdec: note: the prompt is given as a user's message in the model's chat template; --raw"
    )
    assert main(["run", "-m", instruct, *SHORT, "-p", "hi"]) == 0
    err = capsys.readouterr().err
    assert err.startswith(hint)
    assert err.endswith("note: the answer was cut after 4 tokens; -n allows more\n")
    for more, n_tokens in (((), 4), (("--chat",), 4), (("--raw",), 2), (("-q",), 4)):
        assert main(["run", "-m", instruct, *SHORT, "-p", "hi", "--json", *more]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["stats"]["prompt_tokens"] == n_tokens
        assert err.startswith(hint) == (not more)


def test_an_answer_may_be_longer_than_a_completion(
    capsys: pytest.CaptureFixture[str], instruct: str
) -> None:
    argv = ["run", "-m", instruct, "-p", "hi", "--json", "--threads", "1", "--spec-type", "none"]
    lengths = []
    for more in (("--raw",), ()):
        assert main([*argv, *more, "-c", "600", "--stop", "never"]) == 0
        lengths.append(len(json.loads(capsys.readouterr().out)["token_ids"]))
    assert lengths[0] <= 64 < lengths[1] <= 512


def test_raw_excludes_messages(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (("--chat",), ("--system", "x")):
        expect_error(
            capsys,
            ["run", "-m", "no/such/model", "-p", "x", "--raw", *more],
            f"--raw completes a text, {more[0]} is about messages: leave one out",
        )


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


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """The writing end of a pipe on stdin."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield pipe


def test_a_pipe_without_p_is_the_prompt(
    capsys: pytest.CaptureFixture[str], model: str, piped: TextIO
) -> None:
    piped.write("abcd\n")
    piped.close()
    assert reported(capsys, model)[0]["stats"]["prompt_tokens"] == 4


def test_a_pipe_beside_a_prompt_is_not_read_and_a_note_says_so(
    capsys: pytest.CaptureFixture[str], model: str, piped: TextIO
) -> None:
    note = "specdec: note: the text on stdin is not read"
    assert main(["run", "-m", model, *SHORT, "-p", "ab"]) == 0
    assert note not in capsys.readouterr().err  # nothing is there
    piped.write("x")
    piped.flush()
    assert main(["run", "-m", model, *SHORT, "-p", "ab"]) == 0
    assert note in capsys.readouterr().err
    assert sys.stdin.read(1) == "x"


def test_an_empty_pipe_is_no_prompt(capsys: pytest.CaptureFixture[str], piped: TextIO) -> None:
    piped.close()
    expect_error(capsys, ["run", "-m", "no/such/model"], "stdin has no text: the prompt is empty")


def test_a_file_on_stdin_is_the_prompt(
    capsys: pytest.CaptureFixture[str],
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompt").write_text("abc")
    with (tmp_path / "prompt").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert reported(capsys, model)[0]["stats"]["prompt_tokens"] == 3


@pytest.mark.parametrize("limit", ["-1", "-2"])
def test_without_a_limit_a_text_ends_with_the_context(
    capsys: pytest.CaptureFixture[str], model: str, limit: str
) -> None:
    argv = ["run", "-m", model, "--threads", "1", "--spec-type", "none", "-c", "90", "-p", "abc"]
    assert main([*argv, "-n", limit, "--json", "--stop", "never"]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert output["finish_reason"] == "stop" or len(output["token_ids"]) == 90 - 3
    assert len(output["token_ids"]) > 64, "the seed gives a text that does not end before"
    assert "the context of 90 tokens" in output["finish_note"]


def test_a_context_of_0_is_the_models_own(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert main(["plan", "-m", model, "-c", "0", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["ctx_size"]
    assert whole == json.loads((Path(model) / "config.json").read_text())["max_position_embeddings"]
    assert main(["plan", "-m", model, "-c", str(whole + 1), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ctx_size"] == whole
