"""The page in a browser: conversations with a model, and what goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
from browsing import answers, contrast, script_answer, send, wait_until_idle
from serving import Server


def test_a_conversation_in_a_browser(page: Any) -> None:
    assert page.locator("#model").inner_text() == "tiny"
    assert page.locator("#note").is_hidden()
    assert "budget" in page.locator("#memory").inner_text()
    assert page.locator("#bar span").count() > 2
    page.get_by_text("Settings").click()
    page.get_by_label("Max tokens").fill("40")
    page.get_by_label("Temperature").fill("0")
    send(page, "hello")
    page.locator("#acceptance", has_text="%").wait_for()
    wait_until_idle(page)
    first = answers(page)[0]
    assert first
    assert page.locator(".right").count() > 0  # the draft is the target itself
    assert float(page.locator("#per-pass").inner_text()) > 1
    page.get_by_role("button", name="Regenerate").click()
    page.locator("#acceptance", has_text="%").wait_for()
    wait_until_idle(page)
    assert answers(page) == [first]
    page.get_by_role("button", name="New conversation").click()
    assert page.locator("#log li").count() == 0


STOP_AT_FIRST_TEXT = """() => {
  const timer = setInterval(() => {
    if (!document.querySelector(".assistant > .text")?.textContent) return;
    clearInterval(timer);
    const button = document.getElementById("stop");
    button.dataset.wasRunning = String(!button.disabled);
    button.click();
  }, 5);
}"""
"""A click inside the page: on a busy machine the answer ends before one from outside arrives."""


def test_an_answer_can_be_stopped(page: Any, server: Server) -> None:
    page.evaluate(STOP_AT_FIRST_TEXT)
    send(page, "hello")
    page.locator("#stop[data-was-running]").wait_for(state="attached")
    assert page.locator("#stop").get_attribute("data-was-running") == "true"
    wait_until_idle(page)
    server.wait_until_free()


def test_what_goes_wrong_is_shown(page: Any) -> None:
    send(page, "<b>x</b>" * 100)
    page.get_by_role("alert").wait_for()
    assert "leaves no room" in page.get_by_role("alert").inner_text()
    assert page.locator("#log b").count() == 0
    send(page, "hello")  # an unanswered message does not disturb
    page.locator("#acceptance", has_text="%").wait_for()
    wait_until_idle(page)
    assert answers(page)[-1]


def test_a_setting_that_is_wrong_is_shown_before_anything_is_sent(page: Any) -> None:
    """The message used to be added to the conversation without an answer."""
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("9")
    page.get_by_text("Settings").click()
    send(page, "hello")
    assert page.get_by_label("Temperature").is_visible()
    assert page.locator("#log li").count() == 0
    assert page.get_by_label("Your message").input_value() == "hello"
    page.get_by_label("Temperature").fill("0.75")
    send(page, "hello")
    wait_until_idle(page)
    assert answers(page)[0]


def test_an_answer_that_is_cut_off_does_not_look_finished(page: Any) -> None:
    script_answer(page, {"content": "Paris is"}, is_whole=False)
    send(page, "hello")
    page.get_by_role("alert").wait_for()
    assert "ended in the middle" in page.get_by_role("alert").inner_text()
    assert answers(page)[0] == "Paris is"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_and_used_without_a_mouse(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    names = []
    for _ in range(12):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"send", "show-drafts", "SUMMARY"} <= set(names)
    colours = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert contrast(*colours) >= 7
