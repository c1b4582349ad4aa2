"""Commands of a conversation, typed line by line."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_pair import save_model

from specdec.cli.app import main

Talk = Callable[..., tuple[int, str, str]]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("chat") / "model", seed=1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def talk(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """talk(*lines, options=()): exit code, stdout and stderr of a chat with these lines."""

    def chat(*lines: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        argv = ["chat", "-m", str(model), "-n", "3", "--threads", "1", "--spec-type", "none"]
        code = main([*argv, *options])
        out, err = capsys.readouterr()
        return code, out, err

    return chat


def saved(path: Path) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(path.read_text())["messages"]
    return messages


def test_a_saved_conversation_goes_on(talk: Talk, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    code, out, err = talk("/system Be brief", "hello", f"/save {first}")
    assert code == 0
    assert f"saved 1 turn in {first}" in err
    system, question, answer = saved(first)
    assert (system["content"], question["content"]) == ("Be brief", "hello")
    assert answer == {"role": "assistant", "content": out.removesuffix("\n")}
    code, _, err = talk(f"/load {first}", "more", f"/save {second}", f"/save {second}")
    assert code == 0
    assert saved(second)[:3] == saved(first)
    assert [message["role"] for message in saved(second)[3:]] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no JSON", "is no conversation that /save wrote"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "is no conversation"),
        ('{"messages": [{"role": "user", "content": 1}]}', "is no conversation"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_conversation(
    talk: Talk, tmp_path: Path, content: str | None, reason: str
) -> None:
    path = tmp_path / "notes.txt"
    if content is not None:
        path.write_text(content)
    code, out, err = talk(f"/load {path}", *([f"/save {path}"] if content else []))
    assert (code, out) == (2, "")
    assert reason in err
    if content is not None:
        assert "exists and is no conversation: name another file" in err
        assert path.read_text() == content


def test_clear_and_regenerate(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    code, _, err = talk("one", "/clear", "two", "/regen", f"/save {path}")
    assert code == 0
    assert [message["content"] for message in saved(path)][:1] == ["two"]
    assert len(saved(path)) == 2
    assert "greedy decoding gives the same answer" in err
    code, _, err = talk("/regen")
    assert code == 2
    assert "there is no answer yet" in err


def test_a_regenerated_answer_has_another_seed(talk: Talk) -> None:
    options = ("--temperature", "5", "--seed", "1", "-n", "12")
    _, first, _ = talk("one", options=options)
    _, both, err = talk("one", "/regen", options=options)
    assert both.startswith(first)
    assert both.removeprefix(first) != first
    assert "greedy" not in err


def test_set_changes_and_checks_the_sampling(talk: Talk) -> None:
    code, out, err = talk("/set max-tokens 5", "/set temperature=0.5", "/set temperature off", "x")
    assert code == 0
    assert "max-tokens 5\ntemperature 0.5\n" in err
    assert "cut after --max-tokens 5 tokens; /set max-tokens N" in err
    wrong = {
        "/set temprature 1": "/set has no temprature: did you mean temperature? It takes max-",
        "/set temp 1": "/set has no temp: did you mean temperature? It takes max-tokens",
        "/sytem x": "there is no command /sytem: did you mean /system? /help lists them",
        "/set top-k many": "/set top-k is 'many', must be a whole number, or off",
        "/set top-p 2": "/set top-p is 2.0, must be",
        "/set max-tokens 0": "/set max-tokens is 0, must be",
        "/set max-tokens -2": "/set max-tokens is -2, must be",
        "/set json-schema /no/file": "/no/file: No such file or directory",
        "/set top-p": "/set top-p has no value",
        "/nothing": "there is no command /nothing: /help lists them",
        "/clear all": "/clear takes nothing after it",
        "/save": "/save needs a file",
    }
    code, _, err = talk(*wrong)
    assert code == 2
    assert err.splitlines() == [line for line in err.splitlines() if "error: " in line]
    for line, reason in zip(err.splitlines(), wrong.values(), strict=True):
        assert reason in line


@pytest.mark.parametrize("text", ["/usr/bin is a path", " /help"])
def test_a_message_may_begin_with_a_slash(talk: Talk, tmp_path: Path, text: str) -> None:
    path = tmp_path / "talk.json"
    code, _, _ = talk(text, f"/save {path}")
    assert code == 0
    assert saved(path)[0]["content"] == text.strip()


def test_help_and_statistics(talk: Talk) -> None:
    code, out, err = talk("/help", "/stats", "x", "/stats", "/bye", "never")
    assert code == 0
    for word in "/clear /regen /system /set /save /load /stats /exit Ctrl-D".split():
        assert word in err
    assert "context 0 of" in err
    assert "1 turn\n" in err
    assert err.count("tok/s") == 1


def test_a_message_that_no_context_holds_costs_no_earlier_turn(talk: Talk) -> None:
    code, _, err = talk("ab", "x" * 60, "/stats", options=("-n", "4", "-c", "40"))
    assert code == 2
    assert "tokens, which leaves no room in the context of 40" in err
    assert "forgotten" not in err
    assert "1 turn\n" in err


def test_a_full_context_forgets_the_oldest_turns(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    lines = ["first question", "second question", "third question", f"/save {path}"]
    code, out, err = talk(*lines, options=("-c", "40"))
    assert code == 0
    assert "note: the context of 40 tokens is full: the oldest turn is forgotten" in err
    assert err.count("tok/s") == 3
    assert saved(path)[0]["content"] == "third question"
    code, out, err = talk("x" * 50, "short", options=("-c", "40"))
    assert code == 2, "the first message is longer than the context"
    assert "the prompt has 51 tokens" in err
    assert err.count("tok/s") == 1, "and the next one is answered"
