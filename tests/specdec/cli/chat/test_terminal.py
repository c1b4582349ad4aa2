"""`specdec chat` in a terminal: editing, pastes, Ctrl-C, a full context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from terminals import Terminal

Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(*options): a terminal with a chat that waits for the first message."""
    terminals: list[Terminal] = []

    def chat(*options: str) -> Terminal:
        model = ("-m", "pair:target", "--chat-template", "chatml", "--spec-type", "none")
        terminal = Terminal(tmp_path, ["chat", *model, *options])
        terminals.append(terminal)
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for_prompt()
        return terminal

    yield chat
    for terminal in terminals:
        terminal.close()


def test_a_paste_of_many_lines_is_one_message(start: Start) -> None:
    terminal = start("-n", "4")
    terminal.paste("".join(f"line {n} of the paste\n" for n in range(40)))
    screen = terminal.wait_for("line 39 of the paste")
    assert "tok/s" not in screen, "nothing is sent before Enter"
    terminal.press("Enter")
    terminal.wait_for("tok/s")
    terminal.wait_for_prompt()
    terminal.type("/stats")
    terminal.press("Enter")
    assert "1 turn\n" in terminal.wait_for("so far")
    assert terminal.screen().count("tok/s") == 1


def test_arrows_edit_a_message_and_recall_earlier_ones(start: Start) -> None:
    terminal = start("-n", "4")
    terminal.type("/system abd")
    terminal.press("Left")
    terminal.type("c")
    terminal.press("Enter")
    terminal.wait_for("system message: abcd")
    terminal.wait_for_prompt()
    terminal.press("Up")
    terminal.wait_for("> /system abcd", n_times=2)
    terminal.type("e")
    terminal.press("Enter")
    terminal.wait_for("system message: abcde")
    terminal.wait_for_prompt()
    terminal.type("/system one\\")  # a backslash before Enter, and Alt-Enter, break the line
    terminal.press("Enter")
    terminal.type("two")
    terminal.press("M-Enter")
    terminal.type("three")
    terminal.press("Enter")
    terminal.wait_for("system message: one\ntwo\nthree")
    terminal.press("C-d")
    terminal.wait_for("exit code 0")


def test_ctrl_c_clears_a_line_then_says_how_to_leave_then_leaves(start: Start) -> None:
    terminal = start("-n", "4")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.press("C-c")
    assert "half a line" not in terminal.wait_for_prompt()
    terminal.press("C-c")
    terminal.wait_for("Ctrl-C again or Ctrl-D leaves")
    terminal.wait_for_prompt()
    terminal.press("C-c")
    screen = terminal.wait_for("exit code 130")
    assert "specdec: interrupted" in screen
    assert "Traceback" not in screen


def test_tab_completes_a_command_that_enter_runs(start: Start) -> None:
    """Also where Tab follows at once, before the menu is there."""
    terminal = start("-n", "4")
    terminal.type("/he")
    terminal.press("Tab")
    terminal.press("Enter")
    terminal.wait_for("show these lines")
    terminal.wait_for_prompt()
    terminal.type("/set temp")
    terminal.press("Tab")
    terminal.type(" 0.5")
    terminal.press("Enter")
    terminal.wait_for("temperature 0.5")


def test_ctrl_c_stops_an_answer_and_nothing_else(start: Start) -> None:
    terminal = start("-n", "1500")
    terminal.type("def f(x):")
    terminal.press("Enter")
    terminal.wait_for("|mod|mod|mod")  # the answer has begun
    terminal.press("C-c")
    terminal.wait_for("stopped")
    assert "tok/s" not in terminal.wait_for_prompt()
    terminal.type("/set max-tokens 3")
    terminal.press("Enter")
    terminal.wait_for("max-tokens 3")
    terminal.type("x")
    terminal.press("Enter")
    terminal.wait_for("the answer was cut after --max-tokens 3 tokens")


def test_a_full_context_forgets_the_oldest_turns(start: Start) -> None:
    terminal = start("-n", "16", "-c", "96")
    n_asked = 0
    while "forgotten" not in terminal.screen():
        n_asked += 1
        assert n_asked < 10, terminal.screen()
        terminal.type("def a_function(with_a_parameter):")
        terminal.press("Enter")
        terminal.wait_for("tok/s", n_times=n_asked)
        terminal.wait_for_prompt()
    assert n_asked > 1
    screen = terminal.screen()
    assert "note: the context of 96 tokens is full: the oldest" in screen
    assert screen.count("tok/s") == n_asked, "every message got its answer"
    assert "error" not in screen
